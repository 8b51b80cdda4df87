"""Gumbel noise that is a function of (seed, position, id): a counter-based generator, not a stream.

    u = (top 23 bits of mix(mix(id ^ first) + second) + 1/2) / 2**23,    noise = -log(-log(u))

mix is a 32-bit integer finaliser (constants of Wellons' "lowbias32"); first and second are 32 bits each, which four
more rounds of it make of seed and position. The Triton functions yield the same bits as the reference, which emulates
unsigned 32-bit arithmetic in int64; the two logarithms may differ in their last bit.
"""

from typing import Any

import torch

from minserve.kernels.lang import tl, triton

_MASK = 0xFFFFFFFF


def _mix_reference(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def gumbel_bits(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The random bits under the noise. seed: [rows, 2] int64, 32 bits each; position: [rows] int64.
    [rows, vocab] int64 of 32 bits."""
    first = _mix_reference(_mix_reference(seed[:, 0] ^ 0x9E3779B9) ^ (position & _MASK))
    second = _mix_reference((_mix_reference(seed[:, 1] ^ 0x85EBCA6B) + first) & _MASK)
    ids = torch.arange(vocab_size, device=seed.device)
    return _mix_reference((_mix_reference(ids[None, :] ^ first[:, None]) + second[:, None]) & _MASK)


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise. seed: [rows, 2] int64, 32 bits each; position: [rows] int64. [rows, vocab] float32."""
    # 23 bits and a half: the largest value is 1 - 2**-24, the largest float32 below 1, so the noise is finite.
    uniform = ((gumbel_bits(seed, position, vocab_size) >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed_low, seed_high, position) -> tuple[Any, Any]:
    """(first, second) of a row, uint32 scalars. seed_low, seed_high, position: int64 scalars."""
    first = _mix(_mix(seed_low.to(tl.uint32) ^ 0x9E3779B9) ^ position.to(tl.uint32))
    return first, _mix(_mix(seed_high.to(tl.uint32) ^ 0x85EBCA6B) + first)


@triton.jit
def noise_bits(ids, first, second) -> Any:
    """The random bits of ids, a block of uint32. ids: a block of int32."""
    return _mix(_mix(ids.to(tl.uint32) ^ first) + second)


@triton.jit
def noise(ids, first, second) -> Any:
    """Standard Gumbel noise of ids, a block of float32."""
    uniform = ((noise_bits(ids, first, second) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
