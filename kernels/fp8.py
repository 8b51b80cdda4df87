"""Projections in 8-bit floating point: rows of E4M3 numbers, each row with a float32 scale of its own.

    scale[r] = max_i |x[r, i]| / 448        x8[r, i] = round_to_e4m3(x[r, i] * 448 / max_i |x[r, i]|)
    y[r, o]  = (sum_i x8[r, i] * w8[o, i]) * scale_x[r] * scale_w[o] + b[o]

E4M3 (arXiv 2209.05433; torch's float8_e4m3fn) has 3 bits of mantissa, numbers up to 448 and steps of 2^-9 near 0. So
rounding moves a number by at most 1/16 of itself or, if it is small, by 2^-10 of its row's scale. Weights are quantized
once, when they are loaded, each output a row; inputs at every call, each token a row: none depends on its neighbours.

On CUDA the tensor cores multiply, through `torch._scaled_mm`: it needs compute capability 8.9 and weights whose sizes
are both multiples of 16, and rounds to bfloat16 before the bias is added. On a CPU the weight is turned into float32 at
every call: that is what the 8-bit numbers stand for, in half of bfloat16's memory between the calls, but it is slow.
"""

import torch
import torch.nn.functional as F

from minserve.kernels.lang import tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MULTIPLE = 16
"""Both sizes of a weight are whole multiples of this."""

CAPABILITY = (8, 9)
"""The compute capability of the first GPUs that multiply FP8 numbers."""

SMALLEST_ABSMAX = 1e-12
"""A row of zeros is scaled as if it had a number of this size."""

MAX_SIZE = 2**16
"""Numbers of a row that one program holds in its registers."""


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of `quantize_rows`."""
    absmax = x.abs().amax(dim=1).float().clamp(min=SMALLEST_ABSMAX)
    # A tensor, since torch divides a number by a tensor in two roundings: it multiplies it with the reciprocal.
    factor = torch.full_like(absmax, FP8_MAX) / absmax
    return (x * factor[:, None]).to(FP8), absmax * (1 / FP8_MAX)


@triton.jit
def _quantize_rows_kernel(
    x, x8, scale, size, block: tl.constexpr, largest: tl.constexpr, smallest_absmax: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    values = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.maximum(tl.max(tl.abs(values), 0), smallest_absmax)
    # Divided as torch divides, once a row: an ordinary division of Triton may be off by two of the last bits.
    values *= tl.div_rn(largest, absmax)
    tl.store(x8 + row * size + column, values.to(x8.dtype.element_ty), mask=inside)
    tl.store(scale + row, absmax * (1 / largest))


def quantize_rows_triton(x: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a row, which reads it once. dtype: of x8; float32 leaves the rounding out.

    (Triton's interpreter rounds to FP8 wrongly, so without a GPU the rounding can not be tested.)
    """
    rows, size = x.shape
    x8 = torch.empty((rows, size), dtype=dtype, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    num_warps = min(16, max(1, block // 512))
    _quantize_rows_kernel[(rows,)](x, x8, scale, size, block, FP8_MAX, SMALLEST_ABSMAX, num_warps=num_warps)
    return x8, scale


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x8, scale) such that x is about x8 * scale[:, None].

    x: [rows, size], contiguous, any float dtype. Returns x8: [rows, size] float8_e4m3fn; scale: [rows] float32.
    """
    assert x.dim() == 2, x.shape
    assert x.is_contiguous(), x.stride()
    assert x.shape[1] <= MAX_SIZE, x.shape
    return quantize_rows_triton(x) if x.is_cuda else quantize_rows_reference(x)


def fp8_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Torch reference of `fp8_linear`: the exact product of the 8-bit numbers, in float32, rounded once."""
    x8, scale = quantize_rows_reference(x)
    out = F.linear(x8.float(), weight.float()) * scale[:, None] * weight_scale
    return (out if bias is None else out + bias).to(x.dtype)


def fp8_linear_cuda(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`fp8_linear` by a kernel that quantizes x, and the tensor cores."""
    x8, scale = quantize_rows_triton(x)
    out = torch._scaled_mm(
        x8,
        weight.t(),
        scale_a=scale[:, None],
        scale_b=weight_scale[None],
        out_dtype=torch.bfloat16,  # the only one that row-wise scales have everywhere
        use_fast_accum=True,
    ).to(x.dtype)
    return out if bias is None else out + bias


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b, where row o of W stands for weight[o] * weight_scale[o], and x is quantized row by row.

    x: [rows, in], contiguous, any float dtype. weight: [out, in] float8_e4m3fn, contiguous, both sizes multiples of 16.
    weight_scale: [out] float32. bias: [out] in x's dtype. Returns [rows, out] in x's dtype.
    """
    assert x.dim() == 2, x.shape
    assert x.is_contiguous(), x.stride()
    assert weight.dtype == FP8, weight.dtype
    assert weight.is_contiguous(), weight.stride()
    assert weight.shape[1] == x.shape[1] <= MAX_SIZE, (x.shape, weight.shape)
    assert weight.shape[0] % MULTIPLE == weight.shape[1] % MULTIPLE == 0, weight.shape
    assert weight_scale.dtype == torch.float32, weight_scale.dtype
    assert weight_scale.shape == weight.shape[:1], (weight_scale.shape, weight.shape)
    assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype), bias
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0])
    return (fp8_linear_cuda if x.is_cuda else fp8_linear_reference)(x, weight, weight_scale, bias)
