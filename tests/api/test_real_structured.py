"""Structured answers of the real command with its default model: they parse, they are valid, whole and streamed."""

import json
import re

import msgspec
import openai
import pytest

from tests.api.conftest import joined_calls

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"


class City(msgspec.Struct, forbid_unknown_fields=True):
    """What the schema below says, in other words."""

    name: str
    country: str
    population: int
    rivers: list[str] = []


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"$ref": "#/$defs/country"},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "$defs": {"country": {"enum": ["France", "Chile", "Japan"]}},
    "required": ["name", "country", "population"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Tell me about Paris as JSON, please."}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.", "strict": True, "parameters": SCHEMA},
}
TIME = {"type": "function", "function": {"name": "time"}}


@pytest.fixture
async def client(real_server):
    async with openai.AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def answers(client, temperature, **fields):
    """The text of a whole answer, and of a streamed one."""
    asked = {"model": MODEL, "messages": ASK, "temperature": temperature, "seed": 5, "max_tokens": 400} | fields
    whole = await client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(**asked, stream=True)
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert streamed == whole.choices[0].message.content
    return streamed


@pytest.mark.parametrize("temperature", [0, 1])
async def test_an_answer_under_a_schema_is_valid(client, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    text = await answers(client, temperature, response_format=form)
    assert 0 <= msgspec.json.decode(text, type=City).population <= 99999999


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"\d{4}-\d\d-\d\d"}, r"\d{4}-\d\d-\d\d"),
        ({"choice": ["yes", "no", "может быть"]}, "yes|no|может быть"),
        ({"grammar": 'root ::= ("Paris" | "Rome") ", " [a-z]+ "."'}, r"(Paris|Rome), [a-z]+\."),
    ],
)
async def test_an_answer_under_another_grammar_is_one_of_its_texts(client, outputs, pattern, temperature):
    text = await answers(client, temperature, extra_body={"structured_outputs": outputs})
    assert re.fullmatch(pattern, text)


async def test_json_object_ends_for_a_model_that_was_not_asked_for_json(client):
    """A model that does not think of JSON begins with blanks, and would go on with them for ever."""
    text = await answers(
        client, 0, messages=[{"role": "user", "content": "hi"}], response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_forced_call_has_arguments_that_fit_its_tool(client, choice, temperature):
    asked = {"model": MODEL, "messages": ASK, "temperature": temperature, "seed": 6, "max_tokens": 600}
    asked |= {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False}
    whole = await client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    [call] = whole.choices[0].message.tool_calls
    if call.function.name == "weather":
        msgspec.json.decode(call.function.arguments, type=City)
    else:
        assert (choice, json.loads(call.function.arguments)) == ("required", {})
    events = [chunk.model_dump(exclude_none=True) async for chunk in await client.chat.completions.create(
        **asked, stream=True
    )]  # fmt: skip
    assert joined_calls(events) == [(call.function.name, call.function.arguments)]


async def test_max_tokens_leaves_it_unfinished_and_says_so(client):
    answer = await client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, temperature=0, response_format={"type": "json_object"}
    )
    assert answer.choices[0].finish_reason == "length"


async def test_several_choices_have_the_schema_each(client):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    answer = await client.chat.completions.create(
        model=MODEL, messages=ASK, n=4, temperature=1, seed=3, max_tokens=400, response_format=form
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len({*texts}) > 1
    for text in texts:
        msgspec.json.decode(text, type=City)


async def test_a_stop_string_ends_it_where_it_stands(client):
    answer = await client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=99, stop=["country"],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert "country" not in answer.choices[0].message.content


async def test_a_grammar_that_would_take_a_process_with_it_is_a_400_and_the_engine_lives(client, real_server):
    chain = "\n".join(['start: R0\nR5000: "b"', *(f'R{n}: "a" R{n + 1}' for n in range(5000))])
    with pytest.raises(openai.BadRequestError, match="nested too deeply"):
        await answers(client, 0, extra_body={"structured_outputs": {"grammar": chain}})
    assert await answers(client, 0, extra_body={"structured_outputs": {"choice": ["alive"]}}) == "alive"
    assert real_server.faults == []
