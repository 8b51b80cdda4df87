"""The folder of an EAGLE-3 draft head into a module that fits its target.

Owns: which files such a head is in, checking that their tensors are exactly those of a head for this target, and
copying each to its place, device and dtype. Does not know: what configs and names mean (models.eagle3_config).

The first heads were published as pytorch_model.bin only. That is a pickle, and is read by torch's restricted unpickler
(weights_only), which makes tensors and containers of them and runs nothing. Either kind of file is mapped, so that all
is checked before the first weight is read.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from minserve.errors import WeightsError
from minserve.folder import file_in_folder, has_file, list_names
from minserve.models.config import ModelConfig
from minserve.models.eagle3 import Eagle3Head, build_eagle3
from minserve.models.eagle3_config import Eagle3Config, head_names, read_eagle3_config
from minserve.weights.loader import INDEX_FILE, SINGLE_FILE, Stored, check_tensors, files_of_index, find_files

BIN_FILE = "pytorch_model.bin"
BIN_INDEX_FILE = "pytorch_model.bin.index.json"

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_VOCABULARY = ("d2t", "t2d")

Tensors = Mapping[str, torch.Tensor]


def load_eagle3(folder: Path, target: ModelConfig, *, device: torch.device | str, dtype: torch.dtype) -> Eagle3Head:
    """The head in this folder (`weights.hub.resolve_draft`), on the device and in the dtype, which are the target's.

    Raises ConfigError or WeightsError if it is not whole, not understood, or not made for this target, naming the
    field, the tensor or both sizes.
    """
    stored = _read_files(folder)
    config = read_eagle3_config(folder, {name: tuple(tensor.shape) for name, tensor in stored.items()}, target)
    tensors = {own: stored[name] for own, name in head_names(stored).items()}
    target_ids = _read_vocabulary(folder, config, tensors)
    head = build_eagle3(config).to(dtype)
    _check(folder, {name: tensor for name, tensor in tensors.items() if name not in _VOCABULARY}, head)
    head.to_empty(device=device)
    for name, place in head.checkpoint_tensors().items():
        place.copy_(tensors[name])
    if target_ids is not None:
        assert head.target_ids is not None
        head.target_ids.copy_(target_ids)
    return head


def _read_files(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder, by their names in the files. Safetensors come first where both are there."""
    has_safetensors = has_file(folder, SINGLE_FILE) or has_file(folder, INDEX_FILE)
    if has_safetensors:
        files = find_files(folder)
    elif has_file(folder, BIN_FILE):
        files = [file_in_folder(folder, BIN_FILE)]
    elif has_file(folder, BIN_INDEX_FILE):
        files = files_of_index(folder, BIN_INDEX_FILE, ".bin")
    else:
        files = find_files(folder)  # which says what is there instead
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        found = _read_safetensors(path) if has_safetensors else _read_bin(path)
        if twice := tensors.keys() & found.keys():
            raise WeightsError(f"{path}: {list_names(twice)} also stands in another file of {folder}")
        tensors |= found
    return tensors


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from error


def _read_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        # The form from before torch 1.6 is no archive, and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    # A damaged or hostile file fails anywhere inside of the unpickler.
    except Exception as error:
        raise WeightsError(f"{path}: not a file of tensors alone, or damaged ({type(error).__name__})") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        for name, value in content.items()
    ):
        raise WeightsError(f"{path}: not an object of plain tensors by name")
    return content


def _read_vocabulary(folder: Path, config: Eagle3Config, tensors: Tensors) -> torch.Tensor | None:
    """[draft_vocab_size] int64: the target's id of each of the head's; None: they are the same.

    d2t: [draft_vocab_size], what must be added to the head's id. t2d: [target_vocab_size], true where the head has the
    token; not needed, and checked because a contradiction shows that a file is not what it seems.
    """
    num_drafts, num_tokens = config.draft_vocab_size, config.target_vocab_size
    for name, size in zip(_VOCABULARY, (num_drafts, num_tokens)):
        tensor = tensors.get(name)
        if tensor is not None and (tuple(tensor.shape) != (size,) or tensor.is_floating_point()):
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            raise WeightsError(f"{folder}: {name} is {found}; for this target it must be [{size}] of whole numbers")
    target_ids = None
    if "d2t" in tensors:
        target_ids = torch.arange(num_drafts) + tensors["d2t"].long()
        for extreme in (int(target_ids.min()), int(target_ids.max())):
            if not 0 <= extreme < num_tokens:
                raise WeightsError(
                    f"{folder}: d2t leads to token {extreme}, and the target has 0 to {num_tokens - 1}; "
                    "it must hold what is added to a draft id, not the token"
                )
    if "t2d" in tensors:
        named = torch.zeros(num_tokens, dtype=torch.bool)
        named[slice(None) if target_ids is None else target_ids] = True
        if not torch.equal(named, tensors["t2d"] != 0):
            raise WeightsError(f"{folder}: t2d and d2t do not name the same tokens")
    return target_ids


def _check(folder: Path, tensors: Tensors, head: Eagle3Head) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise WeightsError(f"{folder}: {name} holds {tensor.dtype}; supported are {', '.join(map(str, _DTYPES))}")
    stored = {name: Stored(tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    check_tensors(folder, stored, {name: (tuple(part.shape),) for name, part in head.checkpoint_tensors().items()})
