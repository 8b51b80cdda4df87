"""Gumbel noise that is a function of (seed, position, id): a counter-based generator, not a stream.

    u = (top 23 bits of mix(mix(id ^ first) + second) + 1/2) / 2**23,    noise = -log(-log(u))

mix is a 32-bit integer finaliser (constants of Wellons' "lowbias32"); first and second are 32 bits each, which four
more rounds of it make of seed and position. The Triton functions yield the same bits as the reference, whose int32 hold
the bits of unsigned numbers; the two logarithms may differ in their last bit.
"""

from typing import Any

import torch

from minserve.kernels.lang import tl, triton


def _signed(bits: int) -> int:
    """The int32 of these 32 bits."""
    return bits - (bits >> 31 << 32)


def _xor_shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """x ^ (x >> count) of unsigned numbers: a signed one's shift brings its sign along. x is written over."""
    return x.bitwise_xor_((x >> count).bitwise_and_((1 << (32 - count)) - 1))


def _mix_reference(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 on int32, whose products and sums wrap around. x is written over."""
    x = _xor_shifted(x, 16).mul_(0x7FEB352D)
    x = _xor_shifted(x, 15).mul_(_signed(0x846CA68B))
    return _xor_shifted(x, 16)


def gumbel_bits(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The random bits under the noise. seed: [rows, 2] int64, 32 bits each; position: [rows] int64; ids: [ids] int64.
    [rows, ids] int32."""
    # Conversion keeps the lower 32 bits.
    low, high, position = (x.to(torch.int32) for x in (seed[:, 0], seed[:, 1], position))
    first = _mix_reference(_mix_reference(low ^ _signed(0x9E3779B9)) ^ position)
    second = _mix_reference(_mix_reference(high ^ _signed(0x85EBCA6B)) + first)
    return _mix_reference(_mix_reference(ids.to(torch.int32) ^ first[:, None]).add_(second[:, None]))


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise. seed: [rows, 2] int64, 32 bits each; position: [rows] int64; ids: [ids] int64.
    [rows, ids] float32."""
    # 23 bits and a half: the largest value is 1 - 2**-24, the largest float32 below 1, so the noise is finite.
    bits = (gumbel_bits(seed, position, ids) >> 9).bitwise_and_((1 << 23) - 1)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


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
