"""langchain-openai: a chat whole and streamed, a bound tool, structured output, also by way of responses.

Run as: talk_langchain.py URL MODEL
"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=20)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def main(url: str, model: str) -> None:
    options = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options, max_tokens=100)
    whole = chat.invoke(QUESTION).text
    assert "Paris" in whole, whole
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole
    called = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "weather"
    assert chat.with_structured_output(Place, method="json_schema").invoke(QUESTION).city
    responses = ChatOpenAI(**options, max_tokens=100, use_responses_api=True)
    assert "Paris" in responses.invoke(QUESTION).text
    assert "Paris" in "".join(chunk.text for chunk in responses.stream(QUESTION))


if __name__ == "__main__":
    main(*sys.argv[1:])
