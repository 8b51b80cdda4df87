"""The two ends of the socket: a real engine process on a tiny model, and the client that started it."""

import asyncio
import json
import os
import signal

import msgspec
import pytest

from minserve.config import EngineConfig
from minserve.engine.client import EngineClient, joined
from minserve.errors import ConfigError, EngineDeadError
from minserve.protocol import Delta, SamplingParams, Submit
from tests.api.real import engine_process_of
from tests.engine.tiny import CONFIG

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return EngineConfig(
        model_path=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", kv_cache_memory=2**22
    )


def request(request_id, **params):
    return Submit(
        request_id=request_id, prompt_token_ids=[1, 2, 3], params=SamplingParams(**{"max_tokens": 400} | params)
    )


async def drain(client, submit):
    return [delta async for delta in client.generate(submit)]


async def test_a_stop_gives_every_request_its_last_delta(config):
    client = await EngineClient.start(config)
    deltas = client.generate(request("a", ignore_eos=True))
    await anext(deltas)
    waiting = asyncio.create_task(drain(client, request("b")))
    await asyncio.sleep(0)
    await client.stop()
    assert [delta.finish_reason async for delta in deltas][-1] == "abort"
    assert (await waiting)[-1].finish_reason == "abort"
    with pytest.raises(EngineDeadError):
        await anext(client.generate(request("c")))


async def test_an_engine_that_has_done_nothing_yet_says_how_much_room_it_has(config):
    client = await EngineClient.start(config)
    try:
        at_once = client.stats
        async with asyncio.timeout(60):
            while client.stats is at_once:  # until the first heartbeat
                await asyncio.sleep(0.01)
        assert at_once.num_pages == client.stats.num_pages == client.info.num_pages > 0
    finally:
        await client.stop()


async def test_what_waits_to_be_taken_comes_as_one_delta(config):
    client = await EngineClient.start(config)
    try:
        deltas = client.generate(request("a", ignore_eos=True, temperature=0.0, logprobs=1))
        taken = [await anext(deltas)]
        async with asyncio.timeout(60):
            while client.stats.generation_tokens < 400:
                await asyncio.sleep(0)
        taken += [delta async for delta in deltas]
        assert len(taken) == 2
        assert taken[1].finish_reason == "length"
        again = await drain(client, request("b", ignore_eos=True, temperature=0.0, logprobs=1))
        for name in ("token_ids", "logprobs"):
            assert [x for delta in taken for x in getattr(delta, name)] == [
                x for delta in again for x in getattr(delta, name)
            ]
    finally:
        await client.stop()


def delta(*token_ids, **fields):
    return Delta(request_id="a", token_ids=list(token_ids), **fields)


def test_a_failure_stays_apart_from_the_tokens_that_came_before_it():
    for reason in ("error", "abort"):
        failed = delta(finish_reason=reason)
        assert joined([delta(1), delta(2), failed]) == [delta(1, 2), failed]
    assert joined([delta(1), delta(2), None]) == [delta(1, 2), None]


def test_joined_deltas_say_all_that_each_of_them_said():
    first = delta(1, cached_tokens=16, cached_host_tokens=0, prompt_logprobs=[None])
    last = delta(3, finish_reason="stop", stop_token_id=3, draft_tokens=4, accepted_tokens=2)
    assert joined([first, delta(2, draft_tokens=2), last]) == [
        delta(
            *(1, 2, 3), cached_tokens=16, cached_host_tokens=0, prompt_logprobs=[None], finish_reason="stop",
            stop_token_id=3, draft_tokens=4, accepted_tokens=2,
        )
    ]  # fmt: skip


async def test_a_request_that_can_never_be_served_ends_with_an_error_and_the_engine_goes_on(config):
    client = await EngineClient.start(config)
    try:
        [refused] = await drain(client, request("a", max_tokens=10_000))
        assert refused.finish_reason == "error"
        assert "10000" in refused.error
        assert (await drain(client, request("b", max_tokens=2)))[-1].finish_reason == "length"
    finally:
        await client.stop()


async def test_an_engine_that_freezes_ends_every_request_after_its_time_and_is_killed(config):
    client = await EngineClient.start(config, engine_timeout_s=5.0)
    try:
        deltas = client.generate(request("a", ignore_eos=True))
        await anext(deltas)
        engine = engine_process_of(os.getpid())
        os.kill(engine, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="said nothing for 5 s"):
            async for _ in deltas:
                pass
        assert not client.alive
        await client.stop(10)
        assert not os.path.exists(f"/proc/{engine}")
    finally:
        await client.stop(0)


@pytest.mark.parametrize("how", ["killed", "sent what it cannot read"])
async def test_an_engine_that_dies_ends_every_request_and_says_why(config, how):
    client = await EngineClient.start(config)
    try:
        deltas = client.generate(request("a", ignore_eos=True))
        await anext(deltas)
        if how == "killed":
            os.kill(engine_process_of(os.getpid()), signal.SIGKILL)
        else:
            unreadable = asyncio.create_task(drain(client, request("b", temperature=-1.0)))
        with pytest.raises(EngineDeadError, match="-9" if how == "killed" else "ValidationError"):
            async for _ in deltas:
                pass
        assert not client.alive
        if how != "killed":
            with pytest.raises(EngineDeadError):
                await unreadable
    finally:
        await client.stop(0)


async def test_a_configuration_that_the_engine_refuses_is_told_in_its_words(config):
    with pytest.raises(ConfigError, match="--max-model-len 4096"):
        await EngineClient.start(msgspec.structs.replace(config, max_model_len=4096))
