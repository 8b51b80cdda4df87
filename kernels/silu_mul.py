"""The gated activation of Llama's MLP: silu(gate) * up, with silu(g) = g / (1 + exp(-g)) (SwiGLU, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F

from minserve.kernels.lang import tl, triton

WIDTH = 1024
"""Columns a program. With four warps, each thread loads 16 bytes of bfloat16 from gate and from up."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 * size], contiguous, gate first, as one projection writes it. Returns [rows, size]."""
    assert gate_up.is_contiguous(), gate_up.stride()
    assert (gate_up.dim(), gate_up.shape[1] % 2) == (2, 0), gate_up.shape
    return silu_mul_triton(gate_up) if gate_up.is_cuda else silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """In a narrow dtype silu(gate) is rounded before the product, as in transformers."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def _silu_mul_kernel(gate_up, out, size: tl.constexpr, width: tl.constexpr):
    """One program for `width` columns of one row."""
    pieces = (size + width - 1) // width
    row = (tl.program_id(0) // pieces).to(tl.int64)
    columns = tl.program_id(0) % pieces * width + tl.arange(0, width)
    inside = columns < size
    gate = tl.load(gate_up + row * (2 * size) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * size) + size + columns, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _silu_mul_kernel[(rows * triton.cdiv(size, WIDTH),)](gate_up, out, size, WIDTH, num_warps=4)
    return out
