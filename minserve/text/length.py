"""How few tokens a text can have, by its length alone.

Owns: which parts of a tokenizer.json may swallow characters. Does not know: token ids, requests.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from minserve.text.pieces import Pieces

_COMPOSING_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Prepend")
"""They add characters, or compose at most four into one."""

_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace")


class LengthBound(msgspec.Struct, frozen=True):
    """A token stands for at most bytes_per_token bytes of normalized text, the vanishing characters apart.

    keeps_bytes: neither normalization nor spelling makes fewer bytes of a text. If not, one character may stand for up
        to four; ASCII stays as it is.
    """

    bytes_per_token: int
    vanishing: str
    keeps_bytes: bool

    def min_tokens(self, text: str) -> int:
        """At least so many tokens has text. Linear in its length, at the speed of a memory scan."""
        num_vanishing = sum(text.count(char) for char in self.vanishing)
        if text.isascii():
            return -(-(len(text) - num_vanishing) // self.bytes_per_token)
        if not self.keeps_bytes:
            return -(-(len(text) - num_vanishing) // (4 * self.bytes_per_token))
        # The first byte of a character may leave no trace; lone surrogates are refused later.
        num_first = len(text) - len(text.encode("ascii", "ignore"))
        num_bytes = len(text.encode("utf-8", "surrogatepass")) - num_first - num_vanishing
        return -(-num_bytes // self.bytes_per_token)


def read_length_bound(spec: Mapping[str, Any], pieces: Pieces) -> LengthBound | None:
    """The bound of a tokenizer; None if some part of it may drop characters without bound.

    spec: the whole of tokenizer.json.
    """
    model = spec.get("model", {})
    by_bytes = model.get("type") == "BPE" and (model.get("byte_fallback") or _has(spec, "ByteLevel"))
    eats_spaces = any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens", []))
    keeps_text = _keeps_text(spec.get("normalizer")) and _keeps_text(spec.get("pre_tokenizer"))
    if not by_bytes or eats_spaces or not keeps_text:
        return None
    # A byte without a token may leave no trace (SmolLM2 lacks some). A character of several bytes leaves one all the
    # same by its continuation bytes, if these are there.
    spelled = {*pieces.pieces}
    missing = [byte for byte in range(0xC0) if bytes([byte]) not in spelled]
    if any(byte >= 0x80 for byte in missing):
        return None
    longest = max(len(piece) for piece in spelled if piece is not None)
    # SentencePiece spells a space with a character of three bytes, which a text may hold as well.
    keeps_bytes = _has(spec, "ByteLevel") and not _has(spec, "Metaspace") and not _shrinks(spec.get("normalizer"))
    return LengthBound(bytes_per_token=longest, vanishing="".join(map(chr, missing)), keeps_bytes=keeps_bytes)


def _has(spec: Mapping[str, Any], kind: str) -> bool:
    part = spec.get("pre_tokenizer") or {}
    return kind in [part.get("type"), *(inner.get("type") for inner in part.get("pretokenizers", []))]


def _shrinks(part: Mapping[str, Any] | None) -> bool:
    """Whether a normalizer may make fewer bytes of a text."""
    if part is None:
        return False
    if part.get("type") == "Sequence":
        return any(_shrinks(inner) for inner in part.get("normalizers", []))
    if part.get("type") == "Replace":
        return len(part.get("content", "").encode()) < len(part.get("pattern", {}).get("String", "").encode())
    return part.get("type") != "Prepend"


def _keeps_text(part: Mapping[str, Any] | None) -> bool:
    """Whether a normalizer or pre-tokenizer drops no characters."""
    if part is None:
        return True
    kind = part.get("type")
    if kind == "Sequence":
        return all(_keeps_text(inner) for inner in part.get("normalizers", part.get("pretokenizers", [])))
    if kind == "Replace":
        pattern = part.get("pattern", {}).get("String")
        return isinstance(pattern, str) and len(part.get("content", "")) >= len(pattern)
    if kind in ("Split", "Punctuation"):
        return part.get("behavior") != "Removed"
    return kind in _COMPOSING_NORMALIZERS or kind in _KEEPING_PRE_TOKENIZERS
