"""How the values of flags are spelled: sizes, numbers, JSON, files.

Owns: turning a string into a value, or into the reason why it is none. Does not know: which flag it is for.
"""

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minserve.protocol import MAX_DRAFT_TOKENS

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKmMgGtT]?)(?P<suffix>i?[bB])?")


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


def parse_size(text: str) -> int:
    """A count of tokens or bytes: 8192, 64k, 8GiB. As in vLLM, k m g t are thousands and K M G T powers of 1024;
    with a B behind, the standards hold: kB and GB are thousands, KiB and GiB powers of 1024.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 8192, 64k, 8G or 8GiB")
    unit, suffix = match["unit"], match["suffix"] or ""
    binary = suffix.startswith("i") or (unit.isupper() and not suffix)
    power = " kmgt".index(unit.lower()) if unit else 0
    size = float(match["number"]) * (1024 if binary else 1000) ** power
    if not size.is_integer() or size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(size)


def parse_size_or_zero(text: str) -> int:
    """An argparse type: a size as parse_size takes it, or 0."""
    return 0 if text.strip() == "0" else parse_size(text)


def host_kv(text: str) -> int | str:
    """An argparse type: bytes, 0, or auto."""
    try:
        return "auto" if text == "auto" else parse_size_or_zero(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or auto, or 0") from None


def sparse(text: str) -> tuple[str, int]:
    """An argparse type: who is sparse, and from how many tokens on: never, pressure, above 4k. Also above:4k, which is
    one word, as `--flag=value` wants it."""
    mode, _, size = text.replace(":", " ", 1).partition(" ")
    if mode in ("never", "pressure") and not size:
        return mode, 0
    if mode == "above" and size:
        return mode, parse_size_or_zero(size)
    raise argparse.ArgumentTypeError(f"{text!r} is none of never, pressure, above N (such as above 4k)")


def number(kind: Callable[[str], Any], low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: a finite number from low to high."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or value == math.inf:
            allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return value

    return parse


def rope_scaling(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"rope_type": "yarn", "factor": 4.0}')
    return value


def file_text(path: str) -> str:
    """An argparse type: the text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{path} is not UTF-8") from None


def api_key(text: str) -> str:
    """An argparse type: a key that a header can carry."""
    if not text or not text.isprintable() or text != text.strip():
        raise argparse.ArgumentTypeError("must not be empty nor begin or end with a space")
    return text


def origins(text: str) -> list[str]:
    """An argparse type: an origin, "*", or vLLM's JSON list of them."""
    given = [text]
    if text.startswith("["):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    for origin in given:
        if not (isinstance(origin, str) and _ORIGIN.fullmatch(origin)):
            raise argparse.ArgumentTypeError(f"{origin!r} is no origin; write https://example.com, or * for all")
    return given


def draft_tokens(text: str) -> int | None:
    """An argparse type: how many drafts; None for auto."""
    if text == "auto":
        return None
    try:
        return number(int, 1, MAX_DRAFT_TOKENS)(text)  # type: ignore[no-any-return]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or auto") from None


def draft_window(text: str) -> int:
    """An argparse type: tokens, in whole blocks."""
    size = parse_size(text)
    if not 64 <= size <= 2**20 or size % 16:
        raise argparse.ArgumentTypeError(f"must be a multiple of 16 from 64 to {2**20}, got {text}")
    return size


def only_one(text: str) -> int:
    if text != "1":
        raise argparse.ArgumentTypeError(f"only 1 is supported by this version, got {text}")
    return 1
