"""Bytes of a request body in, a checked Struct out.

Owns: how large and how slow a body may be, what counts as JSON here (UTF-8, finite numbers, no duplicate keys, no lone
surrogates), and how a fault is worded.
Does not know: what the fields mean (schemas).
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import msgspec
from aiohttp import web

from minserve.errors import OverloadedError, RequestError, field_fault

T = TypeVar("T", bound=msgspec.Struct)

OffLoop = Callable[[int, Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]]
"""Runs work of a size, in a thread if it is worth one."""

MAX_NAME_CHARS = 100
"""A key is quoted in an error up to here: clients choose how long it is."""


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

    off_loop: runs a long body's parsing elsewhere.
    """

    def __init__(self, max_bytes: int, off_loop: OffLoop, body_s: float = BODY_S) -> None:
        self._max_bytes = max_bytes
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


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Strict JSON to a dict; null members are dropped, since a client's null means "not given"."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            # A function of Python's, so that in a thread a long list of numbers lets other threads run.
            parse_int=lambda text: int(text),
            parse_float=_finite_float,
        )
        # Only an escape can bring a lone surrogate into text that was valid UTF-8.
        has_escapes = b"\\ud" in body or b"\\uD" in body
        surrogate = _surrogate_path(value) if has_escapes else None
    except RecursionError:
        raise RequestError("the body's JSON is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (byte {error.start})", code="invalid_json") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if surrogate is not None:
        param = surrogate.lstrip(".") or None
        raise RequestError(f"{param or 'the body'}: text holds half of a surrogate pair", param=param)
    return {key: item for key, item in value.items() if item is not None}


def convert(fields: dict[str, Any], kind: type[T], where: str = "") -> T:
    """fields as a `kind`; what does not fit becomes a RequestError that names the field. where: the path to fields."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        path, what = field_fault(error, kind)
        param = ".".join(filter(None, (where, path))) or None
        value = fields.get(path)
        given = f", got {value}" if isinstance(value, int | float) and "got" not in what else ""
        raise RequestError(f"{param}: {what}{given}" if param else what, param=param) from None
    except RecursionError:
        raise RequestError("the body's JSON is nested too deeply", code="invalid_json") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {json.dumps(key[:MAX_NAME_CHARS])} is given twice")
            seen.add(key)
    return unique


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is out of range")
    return number


def _surrogate_path(value: Any) -> str | None:
    """Where in value there is text with a lone surrogate; None: nowhere."""
    if isinstance(value, str):
        return None if _is_unicode(value) else ""
    if isinstance(value, dict):
        for key, item in value.items():
            if not _is_unicode(key):
                return ""
            if (inner := _surrogate_path(item)) is not None:
                return f".{key[:MAX_NAME_CHARS]}{inner}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if (inner := _surrogate_path(item)) is not None:
                return f"[{index}]{inner}"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
