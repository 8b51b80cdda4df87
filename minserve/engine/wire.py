"""Frames on the socket between API process and engine process: four bytes of length, then msgpack.

Owns: the framing and the cap on it. Does not know what the messages mean. Imports no torch.
"""

import msgspec

from minserve.errors import EngineError
from minserve.protocol import MAX_MESSAGE_BYTES

HEADER_BYTES = 4


def frame(message: bytes) -> bytes:
    """A message with its length before it."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise EngineError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return len(message).to_bytes(HEADER_BYTES, "big") + message


def body_bytes(header: bytes) -> int:
    """How long the message after this header is. Raises EngineError beyond the cap."""
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise EngineError(f"a message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
    return length


def encode(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytes:
    """A framed message."""
    return frame(encoder.encode(message))
