"""Bytes to a JSON object, and a JSON object to a checked Struct.

Owns: what counts as JSON here (UTF-8, finite numbers, no duplicate keys, no lone surrogates); how a fault is worded.
Does not know: what the fields mean (schemas), where the bytes come from.
"""

import json
import math
from typing import Any, NoReturn, TypeVar

import msgspec

from minserve.errors import RequestError, field_fault

T = TypeVar("T", bound=msgspec.Struct)

MAX_NAME_CHARS = 100
"""A key is quoted in an error up to here: clients choose how long it is."""


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
