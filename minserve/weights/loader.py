"""A folder of safetensors into a model's parameters.

Owns: finding the files, matching their tensors with the model's, and copying each to its device, dtype and place.
Does not know: architectures. The model names its tensors (`CausalLM.checkpoint_tensors`).

Everything is checked from the files' headers before the first byte of a weight is read. Tensors are then copied one by
one out of a mapped file, so that the checkpoint is never in memory as a whole beside the model. Those that are kept in
8 bits are quantized on the way, also one by one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minserve.errors import WeightsError
from minserve.folder import file_in_folder, list_names, read_json_object
from minserve.kernels.fp8 import FP8
from minserve.models.causal_lm import CausalLM
from minserve.models.layers import RMSNorm
from minserve.models.quantization import Fp8Checkpoint
from minserve.weights.fp8 import Block, Shape, fill_fp8, keep_in_fp8, scale_shapes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_DTYPES = ("F64", "F32", "BF16", "F16")
_FP8_DTYPE = "F8_E4M3"

# What old and tied checkpoints carry and no model needs, and the scales of a static quantization of inputs and of KV.
_HARMLESS = ("rotary_emb.inv_freq", ".input_scale", ".k_scale", ".v_scale")

Progress = Callable[[int, int], None]
"""Told of (bytes loaded, bytes in all) after each tensor."""


class Stored(NamedTuple):
    """What a file's header says of one of its tensors."""

    shape: tuple[int, ...]
    dtype: str


def load_weights(
    model: CausalLM,
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    fp8: bool = False,
    progress: Progress | None = None,
) -> int:
    """Give the model its parameters, on the device and in the dtype, from model.safetensors or the files of its index.

    model: built on "meta". fp8: keep the projections of its layers in 8 bits. Those that the checkpoint has in 8 bits
    are kept so anyhow, and then the others are not. Returns the bytes that its parameters take. Raises WeightsError if
    a file is absent, malformed or outside the folder, or if the tensors are not exactly those that the model wants;
    ConfigError if they cannot be kept in 8 bits.
    """
    quantization = model.config.quantization
    dtypes = _DTYPES if quantization is None else (*_DTYPES, _FP8_DTYPE)
    files = {path: _read_header(path, dtypes) for path in find_files(folder)}
    stored = _all_tensors(folder, files)
    scale_of = _scale_names(stored, quantization)
    block = None if quantization is None else quantization.block
    model.to(dtype)
    if fp8 or scale_of:
        keep_in_fp8(model, device, scale_of.keys() or None)
    check_tensors(folder, stored, _wanted_shapes(folder, model.checkpoint_tensors(), scale_of, block))
    model.to_empty(device=device)
    targets = model.checkpoint_tensors()
    scales = dict(_read_tensors(files, scale_of.values()))
    total_bytes = sum(target.nbytes for target in targets.values())
    loaded_bytes = 0
    for name, value in _read_tensors(files, targets.keys() - scales.keys()):
        target, target_scale = targets[name], targets.get(f"{name}_scale")
        if target_scale is None:
            target.copy_(value)
            loaded_bytes += target.nbytes
        else:
            fill_fp8(target, target_scale, value, scales.get(scale_of.get(name, "")), block)
            loaded_bytes += target.nbytes + target_scale.nbytes
        if progress is not None:
            progress(loaded_bytes, total_bytes)
    _free_cache(device)
    return total_bytes


def init_dummy_weights(
    model: CausalLM, *, device: torch.device | str, dtype: torch.dtype, seed: int, fp8: bool = False
) -> int:
    """Give the model small random parameters, made on the device; norms weigh 1. Returns the bytes that they take.

    The same seed, device and dtype give the same values. fp8, or a checkpoint that would be in FP8: these values, but
    for the projections of layers quantized.
    """
    model.to(dtype)
    if fp8 or model.config.quantization is not None:
        keep_in_fp8(model, device)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif parameter.dtype == FP8:
                values = torch.empty_like(parameter, dtype=dtype).normal_(0.0, 0.02, generator=generator)
                fill_fp8(parameter, module.get_parameter("weight_scale"), values)
            elif name != "weight_scale":
                parameter.normal_(0.0, 0.02, generator=generator)
    _free_cache(device)
    return sum(parameter.nbytes for parameter in model.parameters())


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: model.safetensors, or else those that its index names."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: there is no such folder")
    if (folder / SINGLE_FILE).exists():
        return [file_in_folder(folder, SINGLE_FILE)]
    if not (folder / INDEX_FILE).exists():
        raise WeightsError(f"{folder}: {_explain_absence(folder)}")
    return files_of_index(folder, INDEX_FILE, ".safetensors")


def files_of_index(folder: Path, index_file: str, suffix: str) -> list[Path]:
    """The files that an index names, all of them with this suffix."""
    weight_map = read_json_object(folder, index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise WeightsError(f"{folder / index_file}: weight_map must be an object of file names by tensor")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.endswith(suffix):
            raise WeightsError(f"{folder / index_file}: weight_map names {name!r}; only {suffix} files are read")
    return [file_in_folder(folder, name) for name in names]


def _explain_absence(folder: Path) -> str:
    """What to tell a user whose folder has no safetensors under the names that are looked for."""
    wanted = f"there is no {SINGLE_FILE} or {INDEX_FILE}"
    try:
        present = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"{wanted}: {error}"
    pickles = [name for name in present if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return f"{wanted}, only {list_names(pickles)}: pickle files can run code and are not read; convert them first"
    others = [name for name in present if name.endswith((".safetensors", ".gguf"))]
    return f"{wanted}, only {list_names(others)}" if others else wanted


def _read_header(path: Path, dtypes: Collection[str]) -> dict[str, Stored]:
    """What a file holds, in one of the dtypes. The library checks lengths, offsets and overlaps."""
    tensors = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in dtypes and not _is_harmless(name):
                    allowed = ", ".join(dtypes)
                    raise WeightsError(f"{path}: {name} holds {tensor.get_dtype()}; supported are {allowed}")
                tensors[name] = Stored(tuple(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from error
    return tensors


def _all_tensors(folder: Path, files: Mapping[Path, dict[str, Stored]]) -> dict[str, Stored]:
    """The tensors of all files; each stands in one."""
    found: dict[str, Stored] = {}
    for path, tensors in files.items():
        if twice := found.keys() & tensors.keys():
            raise WeightsError(f"{path}: {list_names(twice)} also stands in another file of {folder}")
        found |= tensors
    return found


def _scale_names(stored: Mapping[str, Stored], quantization: Fp8Checkpoint | None) -> dict[str, str]:
    """By the name of each stored weight that is in 8 bits, what its scale must be called."""
    if quantization is None:
        return {}
    return {
        name: name.removesuffix("weight") + quantization.scale_name
        for name, tensor in stored.items()
        if tensor.dtype == _FP8_DTYPE
    }


def _wanted_shapes(
    folder: Path, targets: Mapping[str, torch.Tensor], scale_of: Mapping[str, str], block: Block | None
) -> dict[str, tuple[Shape, ...]]:
    """Every tensor that the files must hold, and the shapes that it may have there."""
    wanted: dict[str, tuple[Shape, ...]] = {
        name: (tuple(target.shape),) for name, target in targets.items() if not name.endswith(".weight_scale")
    }
    for name in scale_of.keys() & targets.keys():
        if f"{name}_scale" not in targets:
            raise WeightsError(f"{folder}: {name} holds {_FP8_DTYPE}; only the projections of layers may")
        wanted[scale_of[name]] = scale_shapes(tuple(targets[name].shape), block)
    return wanted


def check_tensors(folder: Path, stored: Mapping[str, Stored], wanted: Mapping[str, tuple[Shape, ...]]) -> None:
    """The files hold exactly the wanted tensors, in one of their shapes."""
    missing = wanted.keys() - stored.keys()
    left_over = {name for name in stored.keys() - wanted.keys() if not _is_harmless(name)}
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {list_names(missing)}")
    if left_over:
        problems.append(f"{len(left_over)} tensors are left over: {list_names(left_over)}")
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name].shape not in wanted[name]:
            allowed = " or ".join(str(list(shape)) for shape in wanted[name])
            problems.append(f"{name} is {list(stored[name].shape)} where config.json says {allowed}")
            break
    if problems:
        raise WeightsError(f"{folder}: the weights do not fit the model: {'; '.join(problems)}")


def _read_tensors(files: Mapping[Path, Collection[str]], names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the files' tensors that have these names, one by one, as views of the mapped files."""
    for path, present in files.items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in present:
                    if name in names:
                        yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: cannot be read: {error}") from error


def _free_cache(device: torch.device | str) -> None:
    """Give back what conversions took on the way: the KV cache is sized by what is free on the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _is_harmless(name: str) -> bool:
    """Tensors that are in some checkpoints and that no model needs.

    A head that is left over can only be a tied one: the model wants any other.
    """
    return name.endswith(_HARMLESS) or name == "lm_head.weight"
