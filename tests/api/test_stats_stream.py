"""GET /stats/stream: the figures, for whom, for how many, and for how long."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import pytest

from minserve.api import stats
from minserve.protocol import WorkingSet
from tests.api.conftest import chat_body
from tests.api.test_limits import cut_off

PATH = "/stats/stream"
CHAT = "/v1/chat/completions"
FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))


@pytest.fixture
async def quick(start):
    """A server that says its figures as fast as they are read."""
    return await start(stats_interval_s=0.0)


@asynccontextmanager
async def looking(running, query="", **options):
    """look() -> the next event of a stream, None at its end."""
    async with running.http.get(PATH + query, **options) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"

        async def look():
            frame = (await response.content.readuntil(b"\n\n")).decode()
            return None if frame == "data: [DONE]\n\n" else json.loads(frame.removeprefix("data: "))

        yield look


async def held_chat(running, **options):
    """A chat that the engine holds after two tokens."""
    running.engine.hold_at = 2
    num_before = len(running.engine.submits)
    task = asyncio.create_task(running.post(CHAT, chat_body(), **options))
    await running.engine.until(lambda engine: len(engine.submits) > num_before)
    return task


async def refusal(running, query="", **options):
    async with running.http.get(PATH + query, **options) as response:
        return response.status, (await response.json())["error"], response.headers


async def until(look, condition):
    """The first event of which the condition holds."""
    async with asyncio.timeout(10):
        while not condition(event := await look()):
            pass
        return event


async def test_the_first_event_comes_at_once_and_has_gauges_only(running):
    running.engine.counters.num_pages_used = 16
    running.engine.counters.num_waiting = 2
    async with looking(running) as look:
        event = await look()
    assert event["figures"] == {"num_running": 0, "num_waiting": 2, "num_pages": 64, "num_pages_used": 16}
    assert event["requests"] == []


async def test_the_next_has_the_rates_of_the_time_between(quick):
    now = [100.0]
    quick.service.metrics.clock = lambda: now[0]
    async with looking(quick) as look:
        await look()
        counters = quick.engine.counters
        counters.prompt_tokens, counters.generation_tokens = 100, 40
        counters.prefix_queries_tokens, counters.prefix_hits_tokens = 100, 75
        counters.num_host_blocks, counters.num_host_blocks_used = 8, 3
        counters.note_drafts(3, [0, 1, 2, 2])
        quick.service.metrics.first_token(0.25)
        quick.service.metrics.first_token(0.75)
        now[0] = 102.0
        event = await until(look, lambda event: "prompt_tokens_per_s" in event["figures"])
    assert event["figures"] == {
        "num_running": 0, "num_waiting": 0, "num_pages": 64, "num_pages_used": 0,
        "num_host_blocks": 8, "num_host_blocks_used": 3,
        "prompt_tokens_per_s": 50.0, "generation_tokens_per_s": 20.0, "time_to_first_token_s": 0.5,
        "prefix_hit_rate": 0.75, "acceptance": [0.75, 0.5],
    }  # fmt: skip


async def test_sparse_requests_are_told_of_at_once_if_there_ever_was_one(quick):
    """A page that opens a second stream, for one request, would lose sight of them for a second otherwise."""
    quick.engine.counters.num_demotions = 1
    async with looking(quick) as look:
        assert (await look())["figures"]["num_sparse"] == 0


async def test_requests_are_those_that_run_or_wait(quick):
    quick.engine.cached_tokens = 7
    async with looking(quick) as look:
        chat = await held_chat(quick)
        event = await until(look, lambda event: event["requests"] and event["requests"][0]["num_tokens"] == 2)
        submit = quick.engine.submits[0]
        assert event["requests"] == [
            {
                "request_id": submit.request_id,
                "num_prompt_tokens": len(submit.prompt_token_ids),
                "num_cached_tokens": 7,
                "num_tokens": 2,
            }
        ]
        quick.engine.release()
        await chat
        assert (await until(look, lambda event: not event["requests"]))["figures"]["num_running"] == 0


async def test_a_working_set_is_told_of_the_request_that_was_asked_for_while_it_is_sparse(quick):
    chat = await held_chat(quick)
    request_id = quick.engine.submits[0].request_id
    async with looking(quick, f"?request={request_id}") as look, looking(quick) as look_without:
        assert "working_set" not in await look()
        quick.engine.working_sets[request_id] = WorkingSet(
            request_id, 9, 1, 2, b"\x01\x01\xff\x00", b"\x00\x01\x80\x00"
        )
        event = await until(look, lambda event: "working_set" in event)
        assert event["working_set"] == {
            "request_id": request_id, "num_blocks": 9, "num_layers": 1, "num_kv_heads": 2,
            "held": "AQH/AA==", "fetched": "AAGAAA==",
        }  # fmt: skip
        assert "working_set" not in await look_without()
        quick.engine.release()
        await chat
        assert (await until(look, lambda event: "working_set" not in event))["requests"] == []


async def test_a_request_that_has_ended_or_never_was_is_a_404_that_names_the_parameter(running):
    await running.chat()
    for request_id in (running.engine.submits[0].request_id, "x"):
        status, error, _ = await refusal(running, f"?request={request_id}")
        assert (status, error["param"]) == (404, "request")


@pytest.mark.parametrize(
    ("query", "param"), [("?interval=5", "interval"), ("?request=a&request=b", "request"), ("?Request=a", "Request")]
)
async def test_an_unknown_parameter_is_a_400_that_names_it(running, query, param):
    status, error, _ = await refusal(running, query)
    assert (status, error["param"]) == (400, param)
    assert "allowed: request" in error["message"] or "twice" in error["message"]


class TestKeys:
    """With keys, each sees the figures of all and the requests of its own."""

    @pytest.fixture
    async def locked(self, start):
        return await start(api_keys=("first-key", "second-key"), stats_interval_s=0.0)

    @pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
    async def test_without_one_it_is_a_401(self, locked, headers):
        assert (await refusal(locked, headers=headers))[0] == 401

    async def test_nobody_learns_of_another_keys_requests(self, locked):
        chat = await held_chat(locked, headers=FIRST)
        request_id = locked.engine.submits[0].request_id
        async with looking(locked, headers=FIRST) as look:
            await until(look, lambda event: event["requests"])
        async with looking(locked, headers=SECOND) as look:
            event = await look()
            assert (event["requests"], event["figures"]["num_running"]) == ([], 1)
        assert (await refusal(locked, f"?request={request_id}", headers=SECOND))[0] == 404
        async with looking(locked, f"?request={request_id}", headers=FIRST) as look:
            assert await look()
        locked.engine.release()
        await chat


class TestViewers:
    """How many, and for how long."""

    async def test_one_too_many_is_a_503_until_another_leaves(self, quick, monkeypatch):
        monkeypatch.setattr(stats, "MAX_VIEWERS", 2)
        async with looking(quick) as look:
            async with looking(quick):
                status, error, headers = await refusal(quick)
                assert (status, error["code"]) == (503, "too_many_viewers")
                assert int(headers["Retry-After"]) > 0
                assert (await quick.chat())["choices"]
            viewers = quick.server.app[stats.VIEWERS]
            await until(look, lambda _: viewers.num == 1)
            async with looking(quick) as look_again:
                assert await look_again()

    async def test_a_stream_ends_at_once_when_the_server_stops_and_running_requests_do_not(self, start):
        running = await start(stats_interval_s=3600.0)
        chat = await held_chat(running)
        async with looking(running) as look:
            await look()
            running.server.request_stop()
            assert await look() is None
        running.engine.release()
        assert (await chat)[0] == 200
        assert await running.exit_code == 0

    async def test_a_stream_ends_when_the_engine_dies(self, quick):
        async with looking(quick) as look:
            await look()
            quick.engine.die()
            async with asyncio.timeout(10):
                while await look() is not None:
                    pass

    async def test_one_that_does_not_read_is_cut_off(self, start):
        running = await start(stats_interval_s=0.0, stall_s=0.2)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with sock:
            sock.connect(("127.0.0.1", running.port))
            await asyncio.to_thread(sock.sendall, f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await asyncio.wait_for(cut_off(running), 30)
        assert running.server.app[stats.VIEWERS].num == 0

    async def test_while_nobody_looks_the_engine_is_asked_nothing(self, quick, monkeypatch):
        readings = []
        reading = stats._Reading

        def noted(service):
            readings.append(service)
            return reading(service)

        monkeypatch.setattr(stats, "_Reading", noted)
        await quick.chat()
        assert readings == []
        async with looking(quick) as look:
            await look()
        viewers = quick.server.app[stats.VIEWERS]
        async with asyncio.timeout(10):
            while viewers.num:
                await quick.chat()
        num_readings = len(readings)
        await quick.chat()
        assert len(readings) == num_readings > 0


async def test_head_would_never_end_and_is_not_allowed(running):
    async with running.http.head(PATH) as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET")
