"""Text to token ids and back, and what a model folder says of its tokens.

Owns: the `tokenizers` object, the bytes of each token, special and end tokens, the model's sampling defaults.
Does not know: chat templates, streams, HTTP. Imports no torch.

`clean_up_tokenization_spaces` is ignored on purpose: it changes text that byte-level models wrote as they meant it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tokenizers
from msgspec import Meta
from tokenizers.processors import TemplateProcessing

from minserve.errors import ConfigError, RequestError
from minserve.folder import file_in_folder, has_file, read_json_object
from minserve.protocol import PositiveShare, RepetitionPenalty, Share, Temperature
from minserve.text.length import read_length_bound
from minserve.text.pieces import read_pieces

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What generation_config.json recommends; None where it says nothing.

    As in vLLM, `do_sample` is not read: whoever wants greedy text asks for temperature 0.
    """

    temperature: Temperature | None = None
    top_p: PositiveShare | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None


class Tokenizer:
    """One model's tokenizer. Immutable after construction; encode and decode may be called from any thread.

    special_tokens: the named ones, such as "bos_token": "<s>".
    special_token_ids: ids that `skip_special_tokens` leaves out.
    eos_token_ids: every id that ends a text: the union of generation_config, config and tokenizer.
    token_id_ranges: half-open ranges of the ids that are tokens; a model's logits may have more columns.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:
        named = special_tokens or {}
        # Tokens that the configuration names are special even where tokenizer.json forgot to say so.
        backend.add_special_tokens([t for t in named.values() if backend.token_to_id(t) is not None])
        self._backend = backend
        spec = msgspec.json.decode(backend.to_str(), type=dict[str, Any])
        vocab = backend.get_vocab(with_added_tokens=True)
        self._pieces = read_pieces(spec.get("decoder"), vocab)
        self._length_bound = read_length_bound(spec, self._pieces)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = self.token_id(named["bos_token"]) if "bos_token" in named else None
        own_eos_ids = self.ids_of([named["eos_token"]] if "eos_token" in named else [])
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *own_eos_ids}))
        self.adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        self.token_id_ranges = _ranges(sorted(vocab.values()))

    @classmethod
    def from_folder(cls, folder: Path, *, model_folder: Path | None = None) -> "Tokenizer":
        """Read tokenizer.json and tokenizer_config.json of folder, generation_config.json and config.json of the model.

        model_folder: where the latter two are, if not in folder. All but tokenizer.json may be absent.
        Raises ConfigError, naming the file and what is wrong with it.
        """
        if not has_file(folder, "tokenizer.json"):
            raise ConfigError(f"{folder} has no tokenizer.json; give a folder that has one with --tokenizer")
        path = file_in_folder(folder, "tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise ConfigError(f"{path} is not a tokenizer that this version can read: {error}") from error
        # The file may carry the trainer's truncation or padding; neither may touch a prompt.
        backend.no_truncation()
        backend.no_padding()
        config = optional_json_object(folder, "tokenizer_config.json")
        special_tokens = read_special_tokens(folder)
        _apply_bos_eos_flags(backend, config, special_tokens)
        model_folder = model_folder or folder
        generation_config = optional_json_object(model_folder, "generation_config.json")
        model_config = optional_json_object(model_folder, "config.json")
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=[
                *_eos_ids(generation_config, model_folder / "generation_config.json"),
                *_eos_ids(model_config, model_folder / "config.json"),
            ],
            sampling_defaults=_sampling_defaults(generation_config, model_folder / "generation_config.json"),
        )

    def encode(self, text: str, *, add_special_tokens: bool, param: str | None = None) -> list[int]:
        """Token ids of text.

        add_special_tokens: let the tokenizer add what it adds to a plain text (BOS, for models that have one); False
        for a rendered chat, whose template has written it. Never two BOS: a text that begins with one keeps its own.
        Raises RequestError, naming param, for a text that is no Unicode (lone surrogates).
        """
        check_unicode(text, param)
        # Unlike encode, this lets other threads run meanwhile, and it keeps no offsets.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if add_special_tokens and self.adds_bos and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that are no tokens have none; broken UTF-8, a cut end included, is U+FFFD."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join(self._pieces[i] for i in ids if i not in skipped).decode("utf-8", "replace")
        for _ in range(self._pieces.strip_left):
            text = text.removeprefix(" ")
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own; U+FFFD for a part of a character."""
        return self._pieces[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; joined over a text's tokens they are its UTF-8."""
        return self._pieces[token_id]

    def token_id(self, token: str) -> int | None:
        """The id of a token given as the vocabulary spells it, None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """The ids of those of the tokens that the vocabulary has."""
        return frozenset(token_id for token in tokens if (token_id := self.token_id(token)) is not None)

    @property
    def strip_left(self) -> int:
        """Leading spaces that are not part of a text (see Pieces)."""
        return self._pieces.strip_left

    def min_tokens_lower_bound(self, text: str) -> int:
        """At least so many tokens has text: a cheap bound, to refuse what cannot fit unencoded. 0: no bound."""
        return 0 if self._length_bound is None else self._length_bound.min_tokens(text)


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens of a folder: tokenizer_config.json, else the older special_tokens_map.json."""
    older = optional_json_object(folder, "special_tokens_map.json")
    newer = optional_json_object(folder, "tokenizer_config.json")
    named = {name: _added_token_text(newer.get(name, older.get(name))) for name in _NAMED_SPECIAL_TOKENS}
    return {name: text for name, text in named.items() if text is not None}


def optional_json_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder; empty if there is no such file. Raises ConfigError for anything else."""
    return read_json_object(folder, name) if has_file(folder, name) else {}


def _added_token_text(value: Any) -> str | None:
    """A special token in a configuration is its text, or an object that has it as "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def check_unicode(text: str, param: str | None) -> None:
    """Raise RequestError if text has a lone surrogate: JSON can spell it, UTF-8 and the tokenizer cannot."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "send valid Unicode",
            param=param,
        ) from error


def _apply_bos_eos_flags(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """An explicit add_bos_token or add_eos_token overrides tokenizer.json, as it does in transformers."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = special.get("bos_token") if config.get("add_bos_token") else None
    eos = special.get("eos_token") if config.get("add_eos_token") else None
    added = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    known = [(token, token_id) for token, token_id in added if token_id is not None]
    names = {token for token, _ in known}
    template = ([bos] if bos in names else []) + ["$A"] + ([eos] if eos in names else [])
    backend.post_processor = TemplateProcessing(single=template, pair=None, special_tokens=known)


def _eos_ids(config: dict[str, Any], path: Path) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of token ids")
    return ids


def _sampling_defaults(config: dict[str, Any], path: Path) -> SamplingDefaults:
    given = {name: config[name] for name in SamplingDefaults.__struct_fields__ if config.get(name) is not None}
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def _ranges(ids: list[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for token_id in ids:
        if ranges and token_id <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], token_id + 1)
        else:
            ranges.append((token_id, token_id + 1))
    return tuple(ranges)
