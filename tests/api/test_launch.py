"""Start-up and signals, with a scripted engine in place of the engine process."""

import asyncio
import logging
import os
import signal

import aiohttp
import pytest

from minserve.api.launch import launch
from minserve.api.server import bind
from minserve.config import EngineConfig, ServerConfig
from minserve.errors import ConfigError, EngineDeadError
from minserve.protocol import Starting
from tests.api import tiny
from tests.api.fake_engine import FakeEngine


@pytest.fixture
def run(model_folder):
    """run(start_engine) -> (port, the running launch)."""

    def begin(start_engine, **options):
        config = ServerConfig(model_path=str(model_folder), served_model_names=("tiny",), **options)
        sock = bind("127.0.0.1", 0)
        port = sock.getsockname()[1]
        engine_config = EngineConfig(model_path=str(model_folder))
        return port, asyncio.create_task(launch(config, engine_config, *tiny.load(model_folder), start_engine, sock))

    return begin


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_loading_ends_at_once_and_the_engine_is_cancelled(run, number):
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def never_ready(config, *, on_starting):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    _, running = run(never_ready)
    await began.wait()
    os.kill(os.getpid(), number)
    assert await running == 0
    assert cancelled.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_a_running_server_and_the_start_says_what_is_served(run, number, model_folder, caplog):
    engine = FakeEngine(tiny.load(model_folder)[0])

    async def start_engine(config, *, on_starting):
        on_starting(Starting(phase="weights", done=50, total=100))
        return engine

    with caplog.at_level(logging.INFO, logger="minserve"):
        port, running = run(start_engine)
        await engine.watched.wait()
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/ready") as response:
            assert response.status == 200
        os.kill(os.getpid(), signal.SIGUSR1)
        await engine.reported.wait()
        os.kill(os.getpid(), number)
        assert await running == 0
    assert len(engine.stop_timeouts) == 1
    for words in ("tiny: FakeForCausalLM, float32 on cpu", "context 4096 tokens", f":{port}"):
        assert words in caplog.text


async def test_an_engine_that_dies_while_loading_is_exit_code_1(run):
    async def dies(config, *, on_starting):
        raise EngineDeadError("killed by signal 9")

    assert await run(dies)[1] == 1


async def test_a_configuration_that_the_engine_refuses_is_the_commands_to_tell(run):
    async def refuses(config, *, on_starting):
        raise ConfigError("no such dtype")

    with pytest.raises(ConfigError, match="no such dtype"):
        await run(refuses)[1]


async def test_a_port_that_another_server_took_meanwhile_is_told_and_the_engine_is_ended(run, model_folder):
    engine = FakeEngine(tiny.load(model_folder)[0])
    ready = asyncio.Event()

    async def start_engine(config, *, on_starting):
        await ready.wait()
        return engine

    port, running = run(start_engine)
    other = bind("127.0.0.1", port)
    other.listen()
    ready.set()
    with pytest.raises(ConfigError, match="cannot listen"):
        await running
    assert engine.stop_timeouts == [0.0]
    other.close()


def test_a_port_in_use_is_told_before_anything_is_loaded():
    sock = bind("127.0.0.1", 0)
    sock.listen()
    port = sock.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} is already in use"):
        bind("127.0.0.1", port)
    sock.close()


def test_a_host_that_is_none_is_a_configuration_error():
    with pytest.raises(ConfigError, match="host"):
        bind("no.such.host.invalid", 0)
