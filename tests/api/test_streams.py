"""Frames of a stream, what a client sees of failures, and what the engine sees of clients that leave."""

import asyncio
import json

from tests.api.conftest import chat_body, finish_reasons, joined_text


async def open_stream(running, body, path="/v1/chat/completions"):
    """A raw connection with a request sent on it: what a client does at the level of sockets."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def test_usage_comes_in_a_chunk_of_its_own_and_only_if_asked(running):
    for events in (await running.chat_events(), await running.completion_events()):
        assert all("usage" not in event for event in events)
    asked = {"stream_options": {"include_usage": True}}
    for events in (await running.chat_events(**asked), await running.completion_events(**asked)):
        assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]
        assert [event for event in events if "usage" in event] == [events[-1]]
        assert events[-1]["usage"]["completion_tokens"] == 8


async def test_usage_so_far_can_be_asked_for_in_every_chunk(running):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await running.chat_events(stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 8


async def test_the_first_delta_is_the_role_with_empty_content(running):
    events = await running.chat_events()
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_a_failure_in_mid_stream_is_an_error_event_then_done_and_never_a_clean_end(running):
    running.engine.fail_at = 5
    for events in (await running.chat_events(), await running.completion_events()):
        assert events[-1]["error"]["message"] == "out of memory"
        assert events[-1]["error"]["type"] == "internal_server_error"
        assert finish_reasons([event for event in events if "choices" in event]) == []


async def test_a_failure_of_a_whole_answer_is_a_500(running):
    running.engine.fail_at = 5
    status, answer = await running.post("/v1/chat/completions", chat_body())
    assert status == 500
    assert answer["error"]["message"] == "out of memory"


async def test_a_failure_before_the_first_token_has_a_status_even_if_a_stream_was_asked_for(running):
    running.engine.fail_at = 0
    status, answer = await running.post("/v1/chat/completions", chat_body(stream=True))
    assert status == 500
    assert answer["error"]["message"] == "out of memory"


async def test_one_failed_choice_ends_all_of_them(running):
    running.engine.fail_at = 3
    events = await running.chat_events(n=3)
    assert "error" in events[-1]
    assert not running.engine.running


async def test_comments_keep_a_silent_stream_alive(start):
    running = await start(keep_alive_s=0.001)
    running.engine.hold_at = 0
    reader, writer = await open_stream(running, chat_body(stream=True))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"text/event-stream" in head
    await reader.readuntil(b": keep-alive\n\n")
    running.engine.release()
    await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_leaves_a_stream_ends_its_request(running):
    running.engine.hold_at = 3
    reader, writer = await open_stream(running, chat_body(stream=True, n=2))
    await reader.readuntil(b"data: ")
    writer.close()
    await writer.wait_closed()
    await running.engine.until(lambda engine: len(engine.submits) == 2 and not engine.running)
    assert sorted(running.engine.aborted) == sorted(submit.request_id for submit in running.engine.submits)
    await asyncio.wait_for(running.service.admission.wait_idle(), 10)


async def test_a_client_that_leaves_before_the_first_token_ends_its_request_streamed_or_whole(running):
    running.engine.hold_at = 0
    for stream in (True, False):
        num_before = len(running.engine.submits)
        _, writer = await open_stream(running, chat_body(stream=stream))
        await running.engine.until(lambda engine, n=num_before: len(engine.submits) > n)
        writer.close()
        await writer.wait_closed()
        await running.engine.until(lambda engine: not engine.running)
        assert running.engine.aborted[-1] == running.engine.submits[-1].request_id


async def test_a_client_that_stops_reading_is_taken_for_gone(start):
    running = await start(stall_s=0.2)
    running.engine.reply = "x" * 3000
    body = chat_body(stream=True, n=20, logprobs=True, top_logprobs=20, max_tokens=3000)
    _, writer = await open_stream(running, body)
    await running.engine.until(lambda engine: len(engine.submits) == 20)
    await running.engine.until(lambda engine: not engine.running)
    assert running.engine.aborted
    await asyncio.wait_for(running.service.admission.wait_idle(), 10)
    writer.close()


async def test_a_client_that_leaves_does_not_touch_the_others(running):
    running.engine.hold_at = 2
    staying = asyncio.create_task(running.chat_events())
    await running.engine.until(lambda engine: len(engine.submits) == 1)
    _, writer = await open_stream(running, chat_body(stream=True))
    await running.engine.until(lambda engine: len(engine.submits) == 2)
    writer.close()
    await writer.wait_closed()
    await running.engine.until(lambda engine: len(engine.running) == 1)
    running.engine.release()
    assert joined_text(await staying) == "hello world"
    assert running.engine.aborted == [running.engine.submits[1].request_id]


async def test_logprobs_streamed_equal_those_of_the_whole_answer(running):
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = (await running.chat(**fields))["choices"][0]["logprobs"]["content"]
    events = await running.chat_events(**fields)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        if choice["logprobs"] is not None
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole
    assert len(whole) == 8

    whole = (await running.complete(logprobs=2, echo=True))["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in await running.completion_events(logprobs=2, echo=True)]
    for name, values in whole.items():
        assert [value for part in parts if part for value in part[name]] == values


async def test_logprobs_are_there_while_text_is_held_back(running):
    running.engine.reply = "abcd"
    events = await running.chat_events(logprobs=True, stop="bcx")
    tokens = [t["token"] for e in events for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
    assert tokens == ["a", "b", "c", "d", "<|im_end|>"]
