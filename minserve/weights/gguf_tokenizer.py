"""The tokenizer inside a GGUF file, rebuilt as a tokenizers-library tokenizer.

Owns: byte-level BPE vocabularies (tokenizer.ggml.model "gpt2"), how each known pre-tokenizer splits text, and which
tokens end a generation. Does not know: tensors, or how chat templates are rendered.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from minserve.errors import ConfigError, WeightsError
from minserve.weights.gguf_reader import GGUFFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# GGUF names one end-of-sequence token, while chat models stop at others too: llama.cpp knows those by their text.
_END_OF_GENERATION = frozenset(
    ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|eot|>", "<EOT>"]
)

_SPLIT_BEFORE_NUMBERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPLIT_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Scheme:
    """What the one word in tokenizer.ggml.pre stands for.

    gpt2_words: the GPT-2 word pattern splits after make_splitter, which in the others is a word pattern itself.
    ignore_merges: a word that is a token is that token, whatever the merges would make of it.
    add_bos: whether a beginning-of-sequence token is added where the file does not say.
    """

    make_splitter: Callable[[], Any]
    nfc: bool = False
    gpt2_words: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _split_by(numbers: str) -> Callable[[], Any]:
    pattern = _SPLIT_BEFORE_NUMBERS + numbers + _SPLIT_AFTER_NUMBERS
    return lambda: pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_LLAMA3 = _Scheme(_split_by(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_SCHEMES = {
    "smollm": _Scheme(lambda: pre_tokenizers.Digits(individual_digits=True), gpt2_words=True),
    "qwen2": _Scheme(_split_by(r"\p{N}"), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


class GGUFTokenizer:
    """A GGUF file's tokenizer and what goes with it: special token ids and the chat template.

    A byte whose token the vocabulary lacks is dropped from the text, as the tokenizers library does for BPE without an
    unknown token and so as the original does.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        model = file.require("tokenizer.ggml.model", str)
        if model != "gpt2":
            raise ConfigError(
                f"{file.path}: tokenizer.ggml.model is {model!r}; only byte-level BPE ('gpt2') is supported"
            )
        scheme_name = file.require("tokenizer.ggml.pre", str)
        if scheme_name not in _SCHEMES:
            allowed = ", ".join(_SCHEMES)
            raise ConfigError(f"{file.path}: tokenizer.ggml.pre is {scheme_name!r}; supported are {allowed}")
        scheme = _SCHEMES[scheme_name]
        self._tokens = self._list("tokenizer.ggml.tokens", str)
        self._types = self._list("tokenizer.ggml.token_type", int)
        if len(self._types) != len(self._tokens):
            raise WeightsError(
                f"{file.path}: {len(self._tokens)} tokenizer.ggml.tokens, but {len(self._types)} token types"
            )
        self.bos_token_id = self._special_id("bos")
        self.pad_token_id = self._special_id("padding")
        self._unk_token_id = self._special_id("unknown")
        self.eos_token_ids = self._find_eos_token_ids()
        self._add_bos = file.get("tokenizer.ggml.add_bos_token", bool, scheme.add_bos) and self.bos_token_id is not None
        self._add_eos = file.get("tokenizer.ggml.add_eos_token", bool, False) and bool(self.eos_token_ids)
        self._tokenizer = self._build(scheme)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def write(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._add_bos,
            "add_eos_token": self._add_eos,
        }
        special_ids = {
            "bos_token": self.bos_token_id,
            "eos_token": self.eos_token_ids[0] if self.eos_token_ids else None,
            "pad_token": self.pad_token_id,
            "unk_token": self._unk_token_id,
        }
        config |= {name: self._tokens[token_id] for name, token_id in special_ids.items() if token_id is not None}
        if "tokenizer.chat_template" in self._file.metadata:
            config["chat_template"] = self._file.require("tokenizer.chat_template", str)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))

    def _build(self, scheme: _Scheme) -> Tokenizer:
        vocab = {token: i for i, token in enumerate(self._tokens) if self._types[i] != _UNUSED}
        if len(vocab) != len(self._tokens) - self._types.count(_UNUSED):
            raise WeightsError(f"{self._file.path}: tokenizer.ggml.tokens holds the same token twice")
        merges = [tuple(merge.split(" ")) for merge in self._list("tokenizer.ggml.merges", str)]
        try:
            tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=scheme.ignore_merges))
        # The tokenizers library raises bare Exceptions.
        except Exception as error:
            raise WeightsError(f"{self._file.path}: tokenizer.ggml.merges cannot be used: {error}") from error
        if scheme.nfc:
            tokenizer.normalizer = normalizers.NFC()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=scheme.gpt2_words)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([scheme.make_splitter(), byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = self._post_processor()
        tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in self._of_type(_CONTROL)])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in self._of_type(_USER_DEFINED)])
        return tokenizer

    def _post_processor(self) -> Any:
        # Named bos and eos: a token's own text could mean something in the template's little language.
        names = ["bos"] * self._add_bos + ["$A"] + ["eos"] * self._add_eos
        ids = {"bos": self.bos_token_id, "eos": next(iter(self.eos_token_ids), None)}
        special = [
            {"id": name, "ids": [token_id], "tokens": [self._tokens[token_id]]}
            for name, token_id in ids.items()
            if token_id is not None
        ]
        template = processors.TemplateProcessing(single=names, special_tokens=special)
        return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])

    def _find_eos_token_ids(self) -> list[int]:
        """The end-of-sequence token first, then all others that end a generation."""
        declared = [self._special_id(name) for name in ("eos", "eot", "eom")]
        by_text = [
            i
            for i, token in enumerate(self._tokens)
            if token in _END_OF_GENERATION and self._types[i] in (_CONTROL, _USER_DEFINED)
        ]
        return list(dict.fromkeys(i for i in [*declared, *by_text] if i is not None))

    def _special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._file.metadata:
            return None
        token_id = self._file.require(key, int)
        if not 0 <= token_id < len(self._tokens):
            raise WeightsError(f"{self._file.path}: {key} is {token_id}, but there are {len(self._tokens)} tokens")
        return token_id

    def _of_type(self, token_type: int) -> list[str]:
        return [token for token, kind in zip(self._tokens, self._types, strict=True) if kind == token_type]

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._file.require(key, list)
        if not all(type(value) is kind for value in values):
            raise WeightsError(f"{self._file.path}: {key} must be a list of {kind.__name__}")
        return values
