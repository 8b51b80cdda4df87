"""Servers to test against: a scripted engine behind the real server object, and the real command as a process."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest

from minserve.api.server import Server, bind
from minserve.api.service import Service
from minserve.config import ServerConfig
from minserve.text.renderer import Renderer
from tests.api import tiny
from tests.api.fake_engine import FakeEngine
from tests.api.real import RealServer

MODEL = "tiny"


@dataclass
class Running:
    """A server on a free port and the clients of it."""

    engine: FakeEngine
    service: Service
    server: Server
    port: int
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI
    exit_code: "asyncio.Task[int]" = field(repr=False)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a POST. body: a JSON value, or bytes as they are."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json"} | kwargs.pop("headers", {})
        async with self.http.post(path, data=data, headers=headers, **kwargs) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"prompt": "Say", "max_tokens": 100} | fields)
        assert status == 200, answer
        return answer

    async def chat(self, **fields: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/chat/completions", chat_body(**fields))
        assert status == 200, answer
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer; the last must be [DONE], and is left out."""
        async with self.http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            frames = (await response.text()).split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2] if not frame.startswith(":")]

    async def chat_events(self, **fields: Any) -> list[Any]:
        return await self.events("/v1/chat/completions", chat_body(**fields))

    async def completion_events(self, **fields: Any) -> list[Any]:
        return await self.events("/v1/completions", {"prompt": "Say", "max_tokens": 100} | fields)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields


def joined_text(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream, chat or completion."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)


def joined_reasoning(events: list[Any], index: int = 0) -> str:
    """The reasoning of one choice of a chat stream, which comes under two names at once."""
    deltas = [choice["delta"] for event in events for choice in event["choices"] if choice["index"] == index]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    return "".join(delta.get("reasoning", "") for delta in deltas)


def joined_calls(events: list[Any], index: int = 0) -> list[tuple[str, str]]:
    """Name and arguments of each call of one choice of a chat stream, joined as OpenAI's clients do it."""
    calls: list[tuple[str, str]] = []
    for event in events:
        for choice in event["choices"]:
            for part in choice["delta"].get("tool_calls", []) if choice["index"] == index else []:
                if part["index"] == len(calls):
                    assert part["id"].startswith("call_")
                    assert part["type"] == "function"
                    calls.append((part["function"]["name"], ""))
                assert part["index"] == len(calls) - 1
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + part["function"]["arguments"])
    return calls


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call of a whole answer's choice."""
    return [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls", [])]


def finish_reasons(events: list[Any], index: int = 0) -> list[str]:
    """Every finish reason that a stream gave one choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny.write_model_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def renderers():
    """renderers(folder) -> its tokenizer, and the processes of its template, which all tests share."""
    loaded = {}

    def load(folder):
        if folder not in loaded:
            tokenizer, template = tiny.load(folder)
            loaded[folder] = tokenizer, Renderer(template)
        return loaded[folder]

    yield load
    for _, renderer in loaded.values():
        renderer.close()


@pytest.fixture
async def start(model_folder, renderers) -> AsyncIterator[Callable[..., Any]]:
    """As `servers` says, for one test."""
    async with servers(model_folder, renderers) as begin:
        yield begin


@asynccontextmanager
async def servers(model_folder, renderers) -> AsyncIterator[Callable[..., Any]]:
    """start(...) -> Running: a server with a scripted engine; options are ServerConfig's and the engine's.

    run=False: the server listens, but nothing watches over its engine.
    """
    async with AsyncExitStack() as stack:

        async def begin(
            *,
            folder=model_folder,
            engine_options=None,
            keep_alive_s: float = 3600.0,
            stall_s: float = 3600.0,
            idle_s: float = 3600.0,
            body_s: float = 3600.0,
            stats_interval_s: float = 3600.0,
            key: str | None = None,
            run: bool = True,
            renderer: Renderer | None = None,
            **options,
        ) -> Running:
            tokenizer, shared = renderers(folder)
            renderer = renderer or shared
            engine = FakeEngine(tokenizer, **(engine_options or {}))
            config = ServerConfig(**{"model_path": str(folder), "served_model_names": (MODEL,)} | options)
            sock: socket.socket = bind("127.0.0.1", 0)
            times = {"keep_alive_s": keep_alive_s, "body_s": body_s, "stats_interval_s": stats_interval_s}
            service = Service(config, engine, tokenizer, renderer, **times)
            server = Server(service, sock, stall_s=stall_s, idle_s=idle_s)
            await server.start()
            port = sock.getsockname()[1]
            exit_code = asyncio.create_task(server.run() if run else asyncio.sleep(0, -1))

            async def end() -> None:
                server.request_stop()
                server.request_stop()
                await exit_code
                if not run:
                    await server.close()

            stack.push_async_callback(end)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            http = await stack.enter_async_context(
                aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers, raise_for_status=False)
            )
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key or "none", max_retries=0)
            )
            return Running(engine, service, server, port, http, client, exit_code)

        yield begin


@pytest.fixture
async def running(start) -> Running:
    """A server with default options."""
    return await start()


@pytest.fixture(scope="session")
def real_server():
    """The command with its default model, shared by the tests that leave it as it was."""
    server = RealServer("--max-num-seqs", "4")
    yield server
    server.end()


@pytest.fixture
def start_real():
    """start_real(*flags) -> RealServer, for the tests that end it."""
    servers = []

    def start(*flags: str) -> RealServer:
        servers.append(RealServer(*flags))
        return servers[-1]

    yield start
    for server in servers:
        server.end()
