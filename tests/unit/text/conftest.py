"""Two small tokenizers of the kinds that models have: byte-level BPE (Qwen, Llama 3), SentencePiece-like (Llama 2)."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minserve.text.tokenizer import Tokenizer

CORPUS = [
    "The capital of France is Paris, and it amuses everyone there.",
    "Here is the alphabet: ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "one two three, one two three, ha ha ha ha",
    "世界 한국어로 자기소개 🌶 naïve café",
] * 4


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|begin|>", "<|end|>", "<｜tool▁call｜>"])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
    )
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    latin = [line for line in CORPUS if line.isascii()]
    trained.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), special_tokens={"bos_token": "<|begin|>", "eos_token": "<|end|>"})


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(params=["byte_level", "sentencepiece"], scope="session")
def tokenizer(request) -> Tokenizer:
    """Each of the two."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with the byte-level tokenizer and nothing else."""
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def write(folder: Path):
    """write(name, value) puts a JSON file into the folder."""
    return lambda name, value: (folder / name).write_text(json.dumps(value), encoding="utf-8")
