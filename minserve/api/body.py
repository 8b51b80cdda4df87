"""Request bodies, from the socket to a JSON object.

Owns: how large and how slow a body may be, and when it is parsed. Whoever has sent one has a place, and waits for a
turn.
Does not know: what counts as JSON here (strict_json), what the fields mean (schemas).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from minserve.api.admission import PLACE
from minserve.api.strict_json import decode_object
from minserve.api.turns import Turns
from minserve.errors import OverloadedError, RequestError

OffLoop = Callable[[int, Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]]
"""Runs work of a size, in a thread if it is worth one."""

LONG_BODY_BYTES = 64 * 2**10
"""Shorter JSON is parsed on the spot: a thread would cost more."""

BODY_S = 30.0
BODY_BYTES_PER_S = 16 * 2**10
"""How long a body may take: so long, and longer only at this speed or a better one."""

BODIES_AT_ONCE = 16
"""Bodies of the greatest size that all clients together may be sending; beyond that, they are asked to come again."""

BYTES_PER_VALUE = 4
BYTES_PER_CONTAINER = 32
"""A body of the greatest size may hold a value for so many bytes. "[]," repeated takes 30 times its size in memory."""


class UnsupportedMediaTypeError(RequestError):
    """The body is not plain JSON."""

    status = 415


class BodyTooLargeError(RequestError):
    """The body is larger than the server takes."""

    status = 413


class BodyTimeoutError(RequestError):
    """The body came too slowly."""

    status = 408


class BodyReader:
    """Reads bodies: how large and how slow each may be, and how much all of them hold.

    turns: in which bodies are parsed. off_loop: runs a long body's parsing elsewhere.
    """

    def __init__(self, max_bytes: int, turns: Turns, off_loop: OffLoop, body_s: float = BODY_S) -> None:
        self._max_bytes = max_bytes
        self._turns = turns
        self._off_loop = off_loop
        self._body_s = body_s
        self._num_bytes = 0

    async def read(self, request: web.Request) -> dict[str, Any]:
        """The body as a JSON object, without its null members."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMediaTypeError("compressed bodies are not supported: send the body without it")
        if request.content_type != "application/json":
            raise UnsupportedMediaTypeError("the body must be JSON: send it with Content-Type: application/json")
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_s) as timeout:
                begin = asyncio.get_running_loop().time()
                async for chunk in request.content.iter_any():
                    self._hold(body, chunk)
                    timeout.reschedule(begin + self._body_s + len(body) / BODY_BYTES_PER_S)
            request[PLACE].take()
            await self._turns.next()
            if len(body) < LONG_BODY_BYTES:
                return decode_object(body)
            self._check_values(body)
            return await self._off_loop(len(body), lambda: decode_object(body))
        except TimeoutError:
            raise BodyTimeoutError("the body came too slowly") from None
        finally:
            self._num_bytes -= len(body)

    def _hold(self, body: bytearray, chunk: bytes) -> None:
        if len(body) + len(chunk) > self._max_bytes:
            raise self._too_large()
        if self._num_bytes + len(chunk) > BODIES_AT_ONCE * self._max_bytes:
            raise OverloadedError("too many large requests at once", code="too_many_bodies")
        body += chunk
        self._num_bytes += len(chunk)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body is larger than the {self._max_bytes} bytes allowed")

    def _check_values(self, body: bytearray) -> None:
        """Refuse what would keep Python busy and fill memory. Commas and brackets in text count too: it is a bound."""
        num_containers = body.count(b"[") + body.count(b"{")
        num_values = body.count(b",") + num_containers
        if num_containers > self._max_bytes // BYTES_PER_CONTAINER or num_values > self._max_bytes // BYTES_PER_VALUE:
            raise RequestError("the body holds too many values", code="too_many_values")


BODIES = web.AppKey("bodies", BodyReader)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The request's body as a JSON object, without its null members. Raises RequestError (400, 408, 413, 415, 503)."""
    return await request.app[BODIES].read(request)
