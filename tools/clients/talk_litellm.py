"""litellm, which calls us hosted_vllm: a chat whole and streamed, a tool, a schema. Run as: talk_litellm.py URL NAME"""

import json
import sys

import litellm
from talk_openai import ASK, SCHEMA, WEATHER


def main(url: str, model: str) -> None:
    asked = {
        "model": f"hosted_vllm/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = litellm.completion(**asked).choices[0].message.content
    assert "Paris" in whole, whole
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
    assert streamed == whole
    tool = {"type": "function", "function": WEATHER}
    message = litellm.completion(**asked, tools=[tool], tool_choice="required").choices[0].message
    assert message.tool_calls[0].function.name == "weather"
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    place = litellm.completion(**asked, response_format=form).choices[0].message.content
    assert set(json.loads(place)) == {"city"}


if __name__ == "__main__":
    main(*sys.argv[1:])
