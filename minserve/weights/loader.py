"""A folder of safetensors into a model's parameters.

Owns: finding the files, matching their tensors with the model's, and copying each to its device, dtype and place.
Does not know: architectures. The model names its tensors (`CausalLM.checkpoint_tensors`).

Everything is checked from the files' headers before the first byte of a weight is read. Tensors are then copied one by
one out of a mapped file, so that the checkpoint is never in memory as a whole beside the model.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minserve.errors import WeightsError
from minserve.folder import file_in_folder, list_names, read_json_object
from minserve.models.causal_lm import CausalLM
from minserve.models.layers import RMSNorm

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_DTYPES = ("F64", "F32", "BF16", "F16")

Progress = Callable[[int, int], None]
"""Told of (bytes loaded, bytes in all) after each tensor."""


def load_weights(
    model: CausalLM,
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> int:
    """Give the model its parameters, on the device and in the dtype, from model.safetensors or the files of its index.

    model: built on "meta". Returns the bytes that its parameters take. Raises WeightsError if a file is absent,
    malformed or outside the folder, or if the tensors are not exactly those that the model wants.
    """
    files = {path: _read_header(path) for path in find_files(folder)}
    model.to(dtype)
    _check_tensors(folder, files, model.checkpoint_tensors())
    model.to_empty(device=device)
    targets = model.checkpoint_tensors()
    total_bytes = sum(target.nbytes for target in targets.values())
    loaded_bytes = 0
    for path, shapes in files.items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in shapes:
                    if name not in targets:
                        continue
                    targets[name].copy_(file.get_tensor(name))
                    loaded_bytes += targets[name].nbytes
                    if progress is not None:
                        progress(loaded_bytes, total_bytes)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: cannot be read: {error}") from error
    return total_bytes


def init_dummy_weights(model: CausalLM, *, device: torch.device | str, dtype: torch.dtype, seed: int) -> int:
    """Give the model small random parameters, made on the device; norms weigh 1. Returns the bytes that they take.

    The same seed, device and dtype give the same values.
    """
    model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return sum(parameter.nbytes for parameter in model.parameters())


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: model.safetensors, or else those that its index names."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: there is no such folder")
    if (folder / SINGLE_FILE).exists():
        return [file_in_folder(folder, SINGLE_FILE)]
    if not (folder / INDEX_FILE).exists():
        raise WeightsError(f"{folder}: {_explain_absence(folder)}")
    weight_map = read_json_object(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise WeightsError(f"{folder / INDEX_FILE}: weight_map must be an object of file names by tensor")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.endswith(".safetensors"):
            raise WeightsError(f"{folder / INDEX_FILE}: weight_map names {name!r}; only .safetensors files are read")
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


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a file. The library checks lengths, offsets and overlaps."""
    shapes = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in _DTYPES and not _is_harmless(name):
                    allowed = ", ".join(_DTYPES)
                    raise WeightsError(f"{path}: {name} holds {tensor.get_dtype()}; supported are {allowed}")
                shapes[name] = tuple(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from error
    return shapes


def _check_tensors(
    folder: Path, files: dict[Path, dict[str, tuple[int, ...]]], targets: dict[str, torch.Tensor]
) -> None:
    """The files hold exactly the wanted tensors, each once and in its shape."""
    found: dict[str, tuple[int, ...]] = {}
    for path, shapes in files.items():
        if twice := found.keys() & shapes.keys():
            raise WeightsError(f"{path}: {list_names(twice)} also stands in another file of {folder}")
        found |= shapes
    missing = targets.keys() - found.keys()
    left_over = {name for name in found.keys() - targets.keys() if not _is_harmless(name)}
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {list_names(missing)}")
    if left_over:
        problems.append(f"{len(left_over)} tensors are left over: {list_names(left_over)}")
    for name in sorted(targets.keys() & found.keys()):
        if found[name] != tuple(targets[name].shape):
            problems.append(f"{name} is {list(found[name])} where config.json says {list(targets[name].shape)}")
            break
    if problems:
        raise WeightsError(f"{folder}: the weights do not fit the model: {'; '.join(problems)}")


def _is_harmless(name: str) -> bool:
    """Tensors that old or tied checkpoints carry and no model needs.

    A head that is left over can only be a tied one: the model wants any other.
    """
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
