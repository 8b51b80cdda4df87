"""Root mean square normalization, alone and behind a residual addition.

    rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w        over the last dimension (arXiv 1910.07467)

The mean and the product are taken in float32 and rounded once to x's dtype. A sum with the residual is rounded to that
dtype first, and what is normalized is the rounded sum: the stream that the next layer finds.
"""

import torch
import torch.nn.functional as F

from minserve.kernels.lang import tl, triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size]; weight: [size], same dtype. Returns x's shape and dtype. On CUDA both are contiguous."""
    assert (x.shape[-1:], x.dtype) == (weight.shape, weight.dtype), (x.shape, x.dtype, weight.shape, weight.dtype)
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, and normalize the sum: (rms_norm(x + residual), x + residual).

    x, residual: [rows, size], same dtype; weight: [size]. On CUDA all are contiguous. The residual that comes in is
    consumed: it may be the memory that the sum is returned in. x is not changed.
    """
    assert (x.shape, x.dtype) == (residual.shape, residual.dtype), (x.shape, x.dtype, residual.shape, residual.dtype)
    assert (x.shape[-1:], x.dtype) == (weight.shape, weight.dtype), (x.shape, x.dtype, weight.shape, weight.dtype)
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = residual + x
    return F.rms_norm(residual, weight.shape, weight, eps), residual


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, eps, add: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    """One program a row; width: size, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, width)
    inside = columns < size
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if add:
        values += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        total = values.to(residual.dtype.element_ty)
        tl.store(residual + row + columns, total, mask=inside)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, eps)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is written over `residual`, which is returned."""
    return _launch(x, residual, weight, eps), residual


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert all(tensor is None or tensor.is_contiguous() for tensor in (x, residual, weight))
    size = weight.shape[0]
    width = triton.next_power_of_2(size)
    # Eight values a thread: 16 bytes of bfloat16, one load. Few rows wait for latency, many for memory.
    num_warps = min(max(width // 256, 1), 16)
    out = torch.empty_like(x)
    add = residual is not None
    _rms_norm_kernel[(x.numel() // size,)](
        x, residual if add else x, weight, out, eps, add, size, width, num_warps=num_warps
    )
    return out
