"""The bytes that each token stands for, read from a tokenizer's decoder.

Owns: what the decoders of tokenizer.json mean, token by token, so that text can be put together from bytes.
Does not know: encoding, special tokens, streams.

A tokenizer's own `decode` looks at the whole list of ids. Here each id has its bytes once and for all, and the text of
a list is the UTF-8 of its bytes joined: decoding is a matter of an incremental UTF-8 decoder, exact for every split.
Bytes that are no UTF-8 become U+FFFD, one for each broken character, and cost nothing but themselves (the `tokenizers`
library's ByteFallback gives up a whole run of bytes for one bad one).
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from minserve.errors import ConfigError

MAX_IDS = 2**24
"""Far more than any vocabulary has. A table is made that is as long as the greatest id."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces(msgspec.Struct, frozen=True):
    """pieces[id] is the bytes of a token, None where no token has that id.

    strip_left: how many leading spaces of a whole text are not part of it (SentencePiece writes one before each word).
    """

    pieces: list[bytes | None]
    strip_left: int

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that is no token."""
        if 0 <= token_id < len(self.pieces):
            return self.pieces[token_id] or b""
        return b""


class _Spelling(msgspec.Struct):
    """How a token's text becomes bytes: the union of what the supported decoders do."""

    byte_level: bool = False
    byte_fallback: bool = False
    prefix: str = ""
    replace: list[tuple[str, str]] = []
    strip_left: int = 0
    fused: bool = False


def read_pieces(decoder: Mapping[str, Any] | None, vocab: Mapping[str, int]) -> Pieces:
    """The pieces of a vocabulary under the `decoder` of its tokenizer.json. Raises ConfigError for unknown decoders."""
    spelling = _Spelling()
    if decoder is None:
        # Without a decoder the tokens are words, and the spaces between them are not spelled.
        spelling.prefix, spelling.strip_left = " ", 1
    else:
        _read_decoder(decoder, spelling)
    num_ids = max(vocab.values(), default=-1) + 1
    if num_ids > MAX_IDS:
        raise ConfigError(f"tokenizer.json: the token id {num_ids - 1} is above {MAX_IDS - 1}")
    pieces: list[bytes | None] = [None] * num_ids
    byte_table = _byte_level_table()
    for token, token_id in vocab.items():
        pieces[token_id] = _spell(token, spelling, byte_table)
    return Pieces(pieces=pieces, strip_left=spelling.strip_left)


def _read_decoder(decoder: Mapping[str, Any], spelling: _Spelling) -> None:
    kind = decoder.get("type")
    if kind == "Sequence":
        for part in decoder.get("decoders", []):
            _read_decoder(part, spelling)
    elif kind == "ByteLevel":
        spelling.byte_level = True
    elif kind == "ByteFallback":
        spelling.byte_fallback = True
    elif kind == "Fuse":
        spelling.fused = True
    elif kind == "Metaspace":
        spelling.replace.append((decoder.get("replacement", "▁"), " "))
        spelling.strip_left = 0 if decoder.get("prepend_scheme") == "never" else 1
    elif kind == "Replace" and isinstance(pattern := decoder.get("pattern", {}).get("String"), str):
        spelling.replace.append((pattern, decoder.get("content", "")))
    elif kind == "Strip" and spelling.fused and decoder.get("content") == " " and decoder.get("stop") == 0:
        spelling.strip_left = decoder.get("start", 0)
    else:
        raise ConfigError(
            f"tokenizer.json: the decoder {dict(decoder)} is not supported; supported are ByteLevel, Metaspace, and "
            "sequences of Replace (of a string), ByteFallback, Fuse and Strip (of leading spaces, after Fuse)"
        )


def _spell(token: str, spelling: _Spelling, byte_table: dict[int, str]) -> bytes:
    for old, new in spelling.replace:
        token = token.replace(old, new)
    if spelling.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    if spelling.byte_level:
        try:
            return token.translate(byte_table).encode("latin-1")
        except UnicodeEncodeError:
            pass  # Not written in the byte alphabet (an added token): it stands for its own UTF-8.
    return (spelling.prefix + token).encode()


def _byte_level_table() -> dict[int, str]:
    """GPT-2's alphabet of 256 printable characters, each to the Latin-1 character of its byte.

    Latin-1 characters outside the alphabet map outside Latin-1, so that a token with one of them fails to encode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, "\uffff")
    table |= {byte: chr(byte) for byte in printable}
    table |= {256 + index: chr(byte) for index, byte in enumerate(others)}
    return table
