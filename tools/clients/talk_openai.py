"""The openai package: chats, tools, schemas and responses, whole and streamed. Run as: talk_openai.py URL MODEL"""

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}


def chats(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert "Paris" in whole, whole
    assert chunks[-1].usage.completion_tokens > 0


def tools(client: OpenAI, model: str) -> None:
    offered = [{"type": "function", "function": WEATHER}]
    asked = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 100, "tools": offered}
    answer = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    message = answer.choices[0].message
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    again = client.chat.completions.create(**asked | {"messages": [*ASK, message, result]})
    assert again.choices[0].finish_reason


def schemas(client: OpenAI, model: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_tokens=100, response_format=form
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}


def responses(client: OpenAI, model: str) -> None:
    asked = {"model": model, "input": ASK, "temperature": 0, "max_output_tokens": 60}
    with client.responses.stream(**asked) as stream:
        answer = stream.get_final_response()
    assert "Paris" in answer.output_text
    offered = [{"type": "function", **WEATHER}]
    called = client.responses.create(**asked, tools=offered, tool_choice="required", parallel_tool_calls=False)
    [call] = called.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(**asked | {"input": [*ASK, call, result]}, tools=offered)
    assert again.status in ("completed", "incomplete")


def main(url: str, model: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for talk in (chats, tools, schemas, responses):
        talk(client, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
