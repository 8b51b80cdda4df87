"""How many characters of text one token can stand for, if that is bounded.

Owns: which parts of a tokenizer.json may swallow characters. Does not know: texts, requests.
"""

from collections.abc import Mapping
from typing import Any

from minserve.text.pieces import Pieces

_COMPOSING_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Prepend")
"""They add characters, or compose at most four into one."""

_UTF8_BYTES = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
"""The bytes that occur in UTF-8."""

_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")


def max_chars_per_token(spec: Mapping[str, Any], pieces: Pieces) -> int | None:
    """The most characters of normalized text in one token; None if some part may drop characters without bound.

    spec: the whole of tokenizer.json.
    """
    model = spec.get("model", {})
    added = spec.get("added_tokens", [])
    spelled = {*pieces.pieces}
    # A byte without a token of its own may vanish (SmolLM2 lacks some).
    if not all(bytes([byte]) in spelled for byte in _UTF8_BYTES):
        return None
    never_unknown = model.get("type") == "BPE" and (model.get("byte_fallback") or _has(spec, "ByteLevel"))
    eats_spaces = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if not never_unknown or eats_spaces or not _keeps_text(spec.get("normalizer")):
        return None
    if not _keeps_text(spec.get("pre_tokenizer")):
        return None
    # A token has at least as many bytes as characters, and added tokens are spelled as they are.
    return max((len(piece) for piece in pieces.pieces if piece), default=1)


def _has(spec: Mapping[str, Any], kind: str) -> bool:
    part = spec.get("pre_tokenizer") or {}
    return kind in [part.get("type"), *(inner.get("type") for inner in part.get("pretokenizers", []))]


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
