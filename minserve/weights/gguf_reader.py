"""The header of a GGUF file: metadata, and where each tensor's bytes are.

Owns: the file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian versions 2 and 3.
Does not know: any architecture or tokenizer; how quantized bytes become numbers.
The gguf library's own reader loops without end over the array lengths that a hostile file may claim, and takes seconds
for a vocabulary; here nothing is read past the file's end, and every fault is a WeightsError that names the file.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from minserve.errors import WeightsError

_T = TypeVar("_T")
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_SCALAR_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    _FLOAT32: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file.

    shape: as torch has it (GGUF stores it reversed).
    rows: [num_rows, row_bytes] uint8, a view of the mapped file; num_rows is the product of all but the last dimension.
    """

    name: str
    shape: tuple[int, ...]
    quantization: Any
    rows: npt.NDArray[np.uint8]


class GGUFFile:
    """A GGUF file, mapped: `metadata` holds plain Python values, `tensors` views."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(path, data.data)
        num_tensors, num_keys = _read_preamble(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.error(f"the key {key!r} appears twice")
            self.metadata[key] = cursor.value(cursor.uint32())
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.get("general.alignment", int, 32)
        if alignment <= 0 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment}, not a power of two")
        data_start = cursor.offset + -cursor.offset % alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for info in infos:
            if info.name in self.tensors:
                raise cursor.error(f"the tensor {info.name!r} appears twice")
            self.tensors[info.name] = _map_tensor(cursor, data, data_start, info)

    def require(self, key: str, kind: type[_T]) -> _T:
        """metadata[key], which must be there and of this type."""
        if key not in self.metadata:
            raise WeightsError(f"{self.path}: the metadata lacks {key!r}")
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        # bool is a kind of int to isinstance, but not to us.
        if type(value) is not kind:
            shown = "a list" if isinstance(value, list) else repr(value)[:80]
            raise WeightsError(f"{self.path}: {key} must be of type {kind.__name__}, not {shown}")
        assert isinstance(value, kind)
        return value

    def get(self, key: str, kind: type[_T], default: _T) -> _T:
        """metadata[key], which must be of this type if it is there."""
        return self.require(key, kind) if key in self.metadata else default


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    quantization: Any
    offset: int


class _Cursor:
    """Reads forward through the header and never past the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.offset = 0
        self._data = data

    def error(self, message: str) -> WeightsError:
        return WeightsError(f"{self.path} is not a valid GGUF file: {message}")

    def take(self, num_bytes: int) -> memoryview:
        end = self.offset + num_bytes
        if end > len(self._data):
            raise self.error(f"it ends inside its header (byte {end} of {len(self._data)} is needed)")
        part = self._data[self.offset : end]
        self.offset = end
        return part

    def uint32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def uint64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        start = self.offset
        try:
            return str(self.take(self.uint64()), "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"the string at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        item_kind, length = self.uint32(), self.uint64()
        if item_kind == _STRING:
            return [self.string() for _ in range(length)]
        return self._scalars(item_kind, length)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALAR_DTYPES:
            raise self.error(f"unknown value type {kind} at byte {self.offset}")
        dtype = np.dtype(_SCALAR_DTYPES[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _FLOAT32:
            # The shortest decimal of the same float32: a config shall say 1e-05, not 9.999999747378752e-06.
            return [float(str(value)) for value in values]
        return list(values.tolist())


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    if bytes(cursor.take(4)) != b"GGUF":
        raise cursor.error("it does not begin with 'GGUF'")
    version = cursor.uint32()
    if version not in (2, 3):
        raise cursor.error(f"version {version:#x}; versions 2 and 3, little-endian, can be read")
    return cursor.uint64(), cursor.uint64()


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string()
    num_dims = cursor.uint32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(f"the tensor {name!r} has {num_dims} dimensions, allowed are 1 to {_MAX_DIMS}")
    shape = tuple(reversed([cursor.uint64() for _ in range(num_dims)]))
    number = cursor.uint32()
    try:
        quantization = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.error(f"the tensor {name!r} has the unknown type {number}") from error
    return _TensorInfo(name, shape, quantization, cursor.uint64())


def _map_tensor(cursor: _Cursor, data: npt.NDArray[np.uint8], data_start: int, info: _TensorInfo) -> GGUFTensor:
    block_size, block_bytes = GGML_QUANT_SIZES[info.quantization]
    *outer, width = info.shape
    if 0 in info.shape or width % block_size:
        raise cursor.error(f"the tensor {info.name!r} of type {info.quantization.name} has the shape {info.shape}")
    num_rows, row_bytes = math.prod(outer), width // block_size * block_bytes
    start = data_start + info.offset
    end = start + num_rows * row_bytes
    if end > len(data):
        raise cursor.error(f"the tensor {info.name!r} ends at byte {end} of {len(data)}: is the download complete?")
    return GGUFTensor(info.name, info.shape, info.quantization, data[start:end].reshape(num_rows, row_bytes))
