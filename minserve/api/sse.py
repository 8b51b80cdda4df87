"""Server-sent events: frames, keep-alive comments, and how a stream ends.

Owns: the wire form of a streamed answer.
Does not know: what the events say.

The status line waits for the first event (or the first keep-alive), so that what fails before it has a proper status.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType

import msgspec
from aiohttp import web

from minserve.api.errors import error_response
from minserve.errors import MinserveError

logger = logging.getLogger("minserve.api")

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx buffers a proxied answer unless it is told not to.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """One streamed answer. Between `async with` it sends a comment whenever keep_alive_s have passed in silence.

    named: each event has its type for a name, and the last one says itself that it is the last; else it is [DONE].
    Sending waits for a client that does not read; how long, is the connection's to say.
    """

    def __init__(self, request: web.Request, keep_alive_s: float, *, named: bool = False) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._named = named
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._silent = True
        self._lock = asyncio.Lock()
        self._pulse: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "EventStream":
        self._pulse = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._pulse is not None
        self._pulse.cancel()
        await asyncio.gather(self._pulse, return_exceptions=True)

    @property
    def started(self) -> bool:
        """Whether the client has been sent a status line."""
        return self.response.prepared

    async def send(self, event: msgspec.Struct) -> None:
        """One event. Raises ConnectionError when the client has gone."""
        self._silent = False
        name = f"event: {event.__struct_config__.tag}\n".encode() if self._named else b""
        await self._write(name + b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def finish(self) -> None:
        """The end of every stream, good or bad."""
        if not self._named:
            await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def _write(self, frame: bytes) -> None:
        async with self._lock:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(frame)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            if self._silent:
                await self._write(b": keep-alive\n\n")
            self._silent = True


async def stream_events(
    request: web.Request,
    events: AsyncGenerator[msgspec.Struct, None],
    *,
    keep_alive_s: float,
    failure: Callable[[Exception], msgspec.Struct] = error_response,
    named: bool = False,
) -> web.StreamResponse:
    """Send the events and the end. What fails in the middle is told by an event, what fails before is raised."""
    async with EventStream(request, keep_alive_s, named=named) as stream, aclosing(events):
        try:
            async for event in events:
                await stream.send(event)
        except ConnectionError:
            raise
        except Exception as error:
            if not stream.started:
                raise
            expected = isinstance(error, MinserveError)
            logger.error("a stream has failed: %s", error, exc_info=None if expected else error)
            await stream.send(failure(error))
        await stream.finish()
    return stream.response
