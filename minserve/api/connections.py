"""Connections: how many there may be, and how long a client may leave what it was sent unread.

Owns: the protocol between the socket and aiohttp's.
Does not know: HTTP, beyond the one answer to a client too many. Slow headers are aiohttp's, slow bodies body's matter.
"""

import asyncio
import logging
import resource
from typing import Any, cast

import msgspec
from aiohttp import web

from minserve.api.errors import error_response
from minserve.errors import OverloadedError

logger = logging.getLogger("minserve.api")

OTHER_FILES = 256
"""Open files that are no client's: sockets to the engine, the model's files, libraries."""

_BODY = msgspec.json.encode(error_response(OverloadedError("too many connections", code="too_many_connections")))
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def room_for_connections(wanted: int) -> int:
    """How many connections this process can have, up to `wanted`; raises its limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        logger.warning("only %d connections are possible: this process may open %d files", soft - OTHER_FILES, soft)
    return min(wanted, max(1, soft - OTHER_FILES))


class Connections:
    """The factory of protocols. stall_s: a client that takes nothing of what waits for it for so long is cut off."""

    def __init__(self, server: web.Server, max_connections: int, stall_s: float) -> None:
        self.server = server
        self.stall_s = stall_s
        self.num_open = 0
        self._max_connections = max_connections

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    @property
    def full(self) -> bool:
        return self.num_open >= self._max_connections


class _Connection(asyncio.Protocol):
    """Passes everything on to a handler of aiohttp's, and watches the buffer of what is to be sent."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._handler: Any = None
        self._transport: asyncio.Transport | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        if self._connections.full:
            self._transport.write(_FULL)
            self._transport.close()
            return
        self._connections.num_open += 1
        self._handler = self._connections.server()
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._handler is None else self._handler.eof_received()

    def pause_writing(self) -> None:
        """The client is not as fast as we are. A stream that waits for it costs a place that others want."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        # Closing would wait for the client to read what is buffered.
        self._stalled = loop.call_later(self._connections.stall_s, self._transport.abort)
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._forget_stall()
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        if self._handler is not None:
            self._connections.num_open -= 1
            self._handler.connection_lost(exc)

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
