"""Frames on the socket between API process and engine process: four bytes of length, then msgpack.

Owns: the framing and the cap on it. Does not know what the messages mean. Imports no torch.
"""

import msgspec

from minserve.errors import EngineError
from minserve.protocol import MAX_MESSAGE_BYTES

HEADER_BYTES = 4


def encode(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytes:
    """A framed message. Raises EngineError beyond the cap."""
    body = encoder.encode(message)
    _check_length(len(body))
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_bytes(header: bytes) -> int:
    """How long the message after this header is. Raises EngineError beyond the cap."""
    length = int.from_bytes(header, "big")
    _check_length(length)
    return length


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise EngineError(f"a message of {num_bytes} bytes exceeds {MAX_MESSAGE_BYTES}")
