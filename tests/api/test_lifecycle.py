"""Full, stopping, dead: what clients see, and how the server ends."""

import asyncio

import pytest

from tests.api.conftest import chat_body, finish_reasons, joined_text

CHAT = "/v1/chat/completions"


async def status_of(running, path):
    async with running.http.get(path) as response:
        return response.status


async def held_stream(running, **fields):
    """A stream whose request the engine holds after two tokens."""
    running.engine.hold_at = 2
    num_before = len(running.engine.submits)
    task = asyncio.create_task(running.chat_events(**fields))
    await running.engine.until(lambda engine: len(engine.submits) > num_before)
    return task


async def test_a_full_queue_is_a_503_with_retry_after(start):
    running = await start(max_num_waiting=1, engine_options={"max_num_seqs": 1})
    streams = [await held_stream(running), await held_stream(running)]
    async with running.http.post(CHAT, json=chat_body()) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["code"] == "queue_full"
    running.engine.release()
    for stream in streams:
        assert joined_text(await stream) == "hello world"
    assert (await running.chat())["choices"][0]["finish_reason"] == "stop"


async def test_stopping_refuses_new_work_and_finishes_the_running(running):
    stream = await held_stream(running)
    running.server.request_stop()
    assert await status_of(running, "/ready") == 503
    assert await status_of(running, "/health") == 200
    async with running.http.post(CHAT, json=chat_body()) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
    running.engine.release()
    events = await stream
    assert joined_text(events) == "hello world"
    assert finish_reasons(events) == ["stop"]
    assert await running.exit_code == 0
    assert len(running.engine.stop_timeouts) == 1


async def test_what_has_not_finished_when_the_time_is_over_gets_an_error_event(start):
    running = await start(shutdown_timeout_s=0.0)
    stream = await held_stream(running)
    running.server.request_stop()
    events = await stream
    assert "shutting down" in events[-1]["error"]["message"]
    assert finish_reasons(events[:-1]) == []
    assert await running.exit_code == 0


async def test_a_second_request_to_stop_ends_at_once(start):
    running = await start(shutdown_timeout_s=3600.0)
    stream = await held_stream(running)
    running.server.request_stop()
    running.server.request_stop()
    assert "error" in (await stream)[-1]
    assert await running.exit_code == 0
    assert running.engine.stop_timeouts == [0.0]


async def test_an_idle_server_stops_at_once(start):
    running = await start(shutdown_timeout_s=3600.0)
    running.server.request_stop()
    assert await running.exit_code == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_when_the_engine_dies_every_stream_gets_an_error_event_and_the_server_exits_non_zero(running, n):
    streams = [await held_stream(running, n=n), await held_stream(running, n=n)]
    running.engine.die("killed by signal 9")
    for stream in streams:
        events = await stream
        assert "killed by signal 9" in events[-1]["error"]["message"]
        assert finish_reasons(events[:-1]) == []
    assert await running.exit_code == 1


async def test_when_the_engine_dies_whole_answers_get_a_500(running):
    running.engine.hold_at = 2
    whole = asyncio.create_task(running.post(CHAT, chat_body()))
    await running.engine.until(lambda engine: len(engine.submits) == 1)
    running.engine.die()
    status, answer = await whole
    assert status == 500
    assert answer["error"]["type"] == "internal_server_error"


async def test_when_the_engine_is_dead_the_probes_say_so_and_new_work_is_a_503(start):
    running = await start(run=False)
    running.engine.die()
    assert await status_of(running, "/ready") == 503
    assert await status_of(running, "/health") == 503
    status, answer = await running.post(CHAT, chat_body())
    assert (status, answer["error"]["code"]) == (503, "engine_dead")
