"""The event stream of /v1/responses: which events, in which order, and how it ends."""

import asyncio
import json

import pydantic
import pytest

from tests.api import tiny
from tests.api.checks import RESPONSES
from tests.api.conftest import MODEL
from tests.api.test_items import ADD, CALL
from tests.api.test_streams import open_stream

FRAME = "response."


@pytest.fixture
async def running(start, tmp_path):
    """A model that opens its reasoning itself."""
    folder = tiny.write_model_folder(tmp_path, template=tiny.THINKING_TEMPLATE)
    return await start(folder=folder, tool_call_parser="hermes")


async def events_of(running, **fields):
    """The events of a stream, of which each has its type for a name, and a number."""
    async with running.http.post(RESPONSES, json={"input": "hi", "stream": True} | fields) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events):
    """The types, with one delta for many."""
    types = [event["type"].removeprefix(FRAME) for event in events]
    return [kind for kind, before in zip(types, [None, *types], strict=False) if kind != before]


def stored(response):
    """What does not differ from one request to another."""
    if isinstance(response, dict):
        return {key: stored(value) for key, value in response.items() if key not in ("id", "call_id", "created_at")}
    return [stored(item) for item in response] if isinstance(response, list) else response


async def test_text_comes_as_one_part_of_one_item_between_the_events_of_its_response(running):
    events = await events_of(running)
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "hello world"
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["text"] == "hello world"
    item_id = events[2]["item"]["id"]
    of_item = [event for event in events if "item_id" in event]
    assert {(event["item_id"], event["output_index"], event["content_index"]) for event in of_item} == {(item_id, 0, 0)}
    assert events[-1]["response"]["usage"]["output_tokens"] == 8


async def test_reasoning_and_calls_have_events_of_their_own(running):
    running.engine.reply = f"<think>\nHm.\n</think>\n\n{CALL}{CALL}"
    events = await events_of(running, tools=[ADD])
    call = [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["type"]) for event in added] == [
        (0, "reasoning"), (1, "function_call"), (2, "function_call"),
    ]  # fmt: skip
    assert (added[1]["item"]["name"], added[1]["item"]["arguments"]) == ("add", "")
    arguments = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    for index in (1, 2):
        assert "".join(event["delta"] for event in arguments if event["output_index"] == index) == '{"a": 1}'


@pytest.mark.parametrize("tokens_per_delta", [1, 7, 1000])
async def test_the_last_event_has_what_a_whole_answer_has(running, tokens_per_delta):
    running.engine.tokens_per_delta = tokens_per_delta
    for reply, max_tokens in (
        (f"<think>\nHm.\n</think>\n\nOne {CALL} two {CALL}", 1000),
        (CALL, 36),
        ("<think>\nHm", 1000),
        ("", 5),
    ):
        running.engine.reply = reply
        fields = {"tools": [ADD], "max_output_tokens": max_tokens}
        status, whole = await running.post(RESPONSES, {"input": "hi"} | fields)
        assert status == 200
        events = await events_of(running, **fields)
        assert events[-1]["type"] == f"response.{whole['status']}"
        assert stored(events[-1]["response"]) == stored(whole)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]


async def test_a_stream_that_is_cut_ends_incomplete(running):
    events = await events_of(running, max_output_tokens=2)
    assert kinds(events)[-2:] == ["output_item.done", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_the_openai_client_streams(running):
    stream = await running.openai.responses.create(model=MODEL, input="hi", stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello world"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "hello world"


async def test_the_openai_clients_helper_puts_a_stream_together(running):
    running.engine.reply = f"<think>\nHm.\n</think>\n\nSum: {CALL}"
    async with running.openai.responses.stream(model=MODEL, input="hi", tools=[ADD]) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output[2].arguments == '{"a": 1}'
    snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert snapshots[-1] == answer.output_text


async def test_the_openai_clients_helper_parses_what_a_schema_holds(running):
    running.engine.reply = '{"a": 3}'

    class Sum(pydantic.BaseModel):
        a: int

    async with running.openai.responses.stream(model=MODEL, input="hi", text_format=Sum) as stream:
        answer = await stream.get_final_response()
    assert answer.output_parsed == Sum(a=3)


async def test_arguments_are_streamed_as_the_model_writes_them(running):
    running.engine.reply = CALL
    running.engine.hold_at = len('<tool_call>{"name": "add", "arguments": {"a":') - len("tool_call>")
    stream = await running.openai.responses.create(model=MODEL, input="hi", tools=[ADD], stream=True)
    arguments = ""
    async for event in stream:
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
            running.engine.release()  # So some of them have come while the engine was held.
    assert arguments == '{"a": 1}'


async def test_a_failure_in_mid_stream_is_the_last_event_and_says_why(running):
    running.engine.fail_at = 3
    events = await events_of(running)
    assert kinds(events)[-2:] == ["output_text.delta", "failed"]
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "out of memory"}
    [message] = response["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "hello w")


async def test_an_engine_that_dies_ends_the_stream_with_a_failure(running):
    running.engine.hold_at = 3
    stream = await running.openai.responses.create(model=MODEL, input="hi", stream=True)
    events = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and len(running.engine.submits) and event.delta == "w":
            running.engine.die()
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "died" in events[-1].response.error.message


async def test_a_failure_before_the_first_token_has_a_status(running):
    running.engine.fail_at = 0
    status, answer = await running.post(RESPONSES, {"input": "hi", "stream": True})
    assert (status, answer["error"]["message"]) == (500, "out of memory")


async def test_a_failure_after_a_comment_and_before_the_first_token_is_an_error_event(start):
    running = await start(keep_alive_s=0.001)
    running.engine.hold_at = running.engine.fail_at = 0
    reader, writer = await open_stream(running, {"input": "hi", "stream": True}, RESPONSES)
    await reader.readuntil(b": keep-alive\n\n")
    running.engine.release()
    await reader.readuntil(b"event: error\ndata: ")
    event = json.loads(await reader.readuntil(b"\n"))
    assert event == {
        "type": "error", "code": "engine_error", "message": "out of memory", "param": None, "sequence_number": 0,
    }  # fmt: skip
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("hold_at", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(running, hold_at, stream):
    running.engine.hold_at = hold_at
    _, writer = await open_stream(running, {"input": "hi", "stream": stream}, RESPONSES)
    await running.engine.until(lambda engine: engine.running)
    writer.close()
    await writer.wait_closed()
    await running.engine.until(lambda engine: not engine.running)
    assert running.engine.aborted == [running.engine.submits[0].request_id]
    await asyncio.wait_for(running.service.admission.wait_idle(), 10)
