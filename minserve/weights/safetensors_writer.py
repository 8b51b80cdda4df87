"""Writing safetensors files tensor by tensor, so that a model larger than memory can be converted.

Owns: the file format (8 bytes of header length, a JSON header, the bytes), shards and their index.
Does not know: where the tensors come from. The safetensors library writes only what is all in memory.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

StoredDtype = Literal["F32", "F16", "BF16"]
_ITEM_BYTES: dict[StoredDtype, int] = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that is not in memory: its place in the file is known from its shape, its bytes are made on demand."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[bytes]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(
    folder: Path,
    tensors: Sequence[PendingTensor],
    *,
    max_shard_bytes: int = 5 * 10**9,
    on_written: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Write model.safetensors, or numbered shards and model.safetensors.index.json when there is more than one."""
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0], on_written)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, on_written)
        weight_map |= {tensor.name: name for tensor in shard}
    total_size = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _split(tensors: Sequence[PendingTensor], max_shard_bytes: int) -> list[list[PendingTensor]]:
    shards: list[list[PendingTensor]] = [[]]
    shard_bytes = 0
    for tensor in tensors:
        if shards[-1] and shard_bytes + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += tensor.num_bytes
    return shards


def _write_file(path: Path, tensors: Sequence[PendingTensor], on_written: Callable[[int], object]) -> None:
    with path.open("wb") as file:
        header = _header(tensors)
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            num_written = 0
            for chunk in tensor.chunks():
                num_written += file.write(chunk)
                on_written(len(chunk))
            assert num_written == tensor.num_bytes, f"{tensor.name}: {num_written} bytes, expected {tensor.num_bytes}"
        # The folder is published by a rename, which a crash may make durable before the bytes.
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[PendingTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)
