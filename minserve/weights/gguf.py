"""GGUF files of the Llama and Qwen3 architectures, converted to Hugging Face folders.

Owns: the conversion from end to end, and where in the cache converted files lie.
Does not know: the file format (gguf_reader), what metadata and tensors mean (gguf_config, gguf_tensors), text
(gguf_tokenizer).
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minserve.errors import ConfigError, WeightsError
from minserve.weights.cache import built_once, cache_root
from minserve.weights.gguf_config import read_config
from minserve.weights.gguf_reader import GGUFFile
from minserve.weights.gguf_tensors import pending_tensors
from minserve.weights.gguf_tokenizer import GGUFTokenizer
from minserve.weights.safetensors_writer import PendingTensor, write_safetensors

CONVERTER_VERSION = 1
"""Part of every converted folder's path: raise it when a conversion's result changes."""

_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def converted_root() -> Path:
    """Where in the user's cache this version of the converter keeps its folders."""
    return cache_root() / f"converted-v{CONVERTER_VERSION}"


def converted_folder(gguf_path: Path, progress: bool = True) -> Path:
    """The folder in the user's cache that holds this file converted, made now if it is not there."""
    try:
        stat = gguf_path.stat()
    except OSError as error:
        raise ConfigError(f"{gguf_path} cannot be read: {error.strerror}") from error
    # Place, size and time tell one file from another without reading gigabytes.
    identity = f"{gguf_path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    tag = hashlib.sha256(identity.encode()).hexdigest()[:12]
    folder = converted_root() / tag / gguf_path.stem
    return built_once(folder, lambda unfinished: convert_gguf(gguf_path, unfinished, progress))


def convert_gguf(gguf_path: Path, out_dir: Path, progress: bool = True, *, max_shard_bytes: int = 5 * 10**9) -> None:
    """Fill the existing folder out_dir with config.json, safetensors and tokenizer files.

    Holds some megabytes of tensors at a time. Raises ConfigError for what is not supported, WeightsError for what is
    broken.
    """
    file = GGUFFile(gguf_path)
    if file.get("split.count", int, 1) > 1:
        raise ConfigError(f"{gguf_path} is one part of several; merge them with llama-gguf-split --merge")
    config = read_config(file)
    tokenizer = GGUFTokenizer(file)
    if config["vocab_size"] < tokenizer.num_tokens:
        raise WeightsError(f"{gguf_path}: {tokenizer.num_tokens} tokens, but only {config['vocab_size']} embeddings")
    pending = pending_tensors(file, config)
    token_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_ids,
        "pad_token_id": tokenizer.pad_token_id,
    }
    _write_json(out_dir / "config.json", config | token_ids | {"dtype": _main_dtype(pending)})
    _write_json(out_dir / "generation_config.json", token_ids)
    tokenizer.write(out_dir)
    total = sum(tensor.num_bytes for tensor in pending)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Converting {gguf_path.name}", disable=not progress) as bar:
        write_safetensors(out_dir, pending, max_shard_bytes=max_shard_bytes, on_written=bar.update)


def _main_dtype(pending: list[PendingTensor]) -> str:
    """The dtype that most of the bytes have."""
    num_bytes: Counter[str] = Counter()
    for tensor in pending:
        num_bytes[tensor.dtype] += tensor.num_bytes
    return _TORCH_DTYPES[num_bytes.most_common(1)[0][0]]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
