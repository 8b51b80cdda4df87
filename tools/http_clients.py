"""Clients that stream completions from a server, all at once, in several processes.

A stream is read as cheaply as its figures allow: an event counts when it has come and whether it has text, no more.
"""

import asyncio
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from threading import Barrier
from typing import Any

import aiohttp
import msgspec
import uvloop
from streams import Stream

SILENCE_S = 300
"""A stream that brings nothing for so long has failed."""

TOGETHER_S = 60.0
"""In which all processes are ready to begin."""


class StreamError(Exception):
    """A stream was not what was asked for."""


class Choice(msgspec.Struct):
    text: str = ""


class Usage(msgspec.Struct):
    completion_tokens: int


class Chunk(msgspec.Struct):
    """What the clients look at in an event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: dict[str, Any] | None = None


DECODER = msgspec.json.Decoder(Chunk)


def body_of(prompt: list[int], new_tokens: int) -> bytes:
    fields = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()


async def stream(session: aiohttp.ClientSession, url: str, body: bytes) -> Stream:
    """Send a request and read its stream to the end. Raises StreamError."""
    sent_s = time.monotonic()
    events_s: list[float] = []
    num_tokens = 0
    rest = b""
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            raise StreamError(f"status {response.status}: {await response.text()}")
        async for data in response.content.iter_any():
            now = time.monotonic()
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: {"):  # a keep-alive comment, or [DONE]
                    continue
                chunk = DECODER.decode(event[len(b"data: ") :])
                if chunk.error is not None:
                    raise StreamError(f"the stream ended with {chunk.error}")
                if chunk.choices and chunk.choices[0].text:
                    events_s.append(now)
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens
    return Stream(sent_s, events_s, num_tokens)


async def streams_of(url: str, bodies: list[bytes]) -> list[Stream]:
    """All of them at once, each on its own connection."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return await asyncio.gather(*(stream(session, url, body) for body in bodies))


_barrier: Barrier


def _join(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def client_process(url: str, prompts: list[list[int]], new_tokens: int) -> tuple[list[Stream], float]:
    """One process's share of the streams, and the seconds of a core that it took. All processes begin at one moment."""
    bodies = [body_of(prompt, new_tokens) for prompt in prompts]
    _barrier.wait(TOGETHER_S)
    begin = time.process_time()
    try:
        streams = uvloop.run(streams_of(url, bodies))
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        # Some of these cannot be sent to the parent process.
        raise StreamError(f"{type(error).__name__}: {error}") from None
    for one in streams:
        if one.num_tokens != new_tokens or not one.events_s:
            raise StreamError(f"a stream has brought {one.num_tokens} tokens in {len(one.events_s)} events of text")
    return streams, time.process_time() - begin


class Clients:
    """The client processes, for one work after another."""

    def __init__(self, url: str, num_processes: int) -> None:
        self._url = url.rstrip("/") + "/v1/completions"
        self._num = num_processes
        spawn = multiprocessing.get_context("spawn")
        barrier = (spawn.Barrier(num_processes),)
        self._pool = ProcessPoolExecutor(num_processes, mp_context=spawn, initializer=_join, initargs=barrier)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Stream], float]:
        """All streams, and the share of a core that the busiest process took. Raises StreamError."""
        # Each process waits for all others before it begins, so each gets one of the calls.
        shares = [prompts[number :: self._num] for number in range(self._num)]
        calls = [self._pool.submit(client_process, self._url, share, new_tokens) for share in shares]
        begin = time.monotonic()
        results = [call.result() for call in calls]
        busiest = max(cpu_s for _, cpu_s in results) / (time.monotonic() - begin)
        return [one for streams, _ in results for one in streams], busiest

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)
