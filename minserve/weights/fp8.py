"""Projections in 8 bits: which they are, and how a checkpoint's tensors fill them.

Owns: what a stored scale stands for, and what is computed once, at the load, so that every row has one scale.
Does not know: files. What multiplies is `minserve.kernels.fp8`.

A weight that is plain is quantized row by row when it arrives, on the device. One that is in FP8 with a scale for each
row, or for all, is kept bit by bit. One with a scale for each block is multiplied out and quantized again, row by row:
that rounds a second time, which is the price of one multiplication for all forms.
"""

from collections.abc import Iterator, Set

import torch

from minserve.errors import ConfigError
from minserve.folder import list_names
from minserve.kernels.fp8 import CAPABILITY, MULTIPLE, quantize_rows
from minserve.models.causal_lm import CausalLM
from minserve.models.layers import FusedLinear, Linear

Shape = tuple[int, ...]
Block = tuple[int, int]


def keep_in_fp8(model: CausalLM, device: torch.device | str, names: Set[str] | None = None) -> None:
    """Keep projections of the layers in FP8: those that a tensor of these names belongs to; None: all of them.

    model: still on "meta". Raises ConfigError if a projection or the device cannot multiply in FP8.
    """
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        raise ConfigError(f"FP8 weights need a GPU of compute capability {needed} or newer (Ada, Hopper)")
    chosen = [
        (path, linear)
        for path, linear in _projections(model)
        if names is None or not names.isdisjoint(_names_of_weights(path, linear))
    ]
    odd = [
        f"{path} {[linear.out_features, linear.in_features]}"
        for path, linear in chosen
        if linear.out_features % MULTIPLE or linear.in_features % MULTIPLE
    ]
    if odd:
        raise ConfigError(f"FP8 weights have multiples of {MULTIPLE} rows and columns, unlike {list_names(odd)}")
    for _, linear in chosen:
        linear.keep_in_fp8()


def scale_shapes(weight: Shape, block: Block | None) -> tuple[Shape, ...]:
    """The shapes that the stored scale of an FP8 weight may have."""
    num_out, num_in = weight
    if block is not None:
        return ((-(-num_out // block[0]), -(-num_in // block[1])),)
    return (num_out, 1), (num_out,), (1,), ()


def fill_fp8(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    stored: torch.Tensor,
    stored_scale: torch.Tensor | None = None,
    block: Block | None = None,
) -> None:
    """Fill weight: [out, in] float8_e4m3fn and weight_scale: [out] float32 with what was stored.

    stored: [out, in] on any device, plain; or FP8, with a stored_scale in one of `scale_shapes`.
    """
    stored = stored.to(weight.device)
    if stored_scale is None:
        stored, stored_scale = quantize_rows(stored)
    elif block is not None:
        stored, stored_scale = quantize_rows(_multiply_out(stored, stored_scale.to(weight.device), block))
    weight.copy_(stored)
    weight_scale.copy_(stored_scale.flatten())


def _multiply_out(weight: torch.Tensor, scale: torch.Tensor, block: Block) -> torch.Tensor:
    """The float32 numbers that a weight with a scale for each block stands for; blocks at the edges may be cut."""
    rows, columns = weight.shape
    by_row = scale.float().repeat_interleave(block[0], dim=0)[:rows]
    return weight.float() * by_row.repeat_interleave(block[1], dim=1)[:, :columns]


def _projections(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    for path, module in model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, Linear):
            yield path, module


def _names_of_weights(path: str, linear: Linear) -> list[str]:
    """What a checkpoint calls the weights that make up this projection."""
    if not isinstance(linear, FusedLinear):
        return [f"{path}.weight"]
    parent = path.rpartition(".")[0]
    return [f"{parent}.{part}.weight" for part in linear.parts]
