"""x W^T + b, and silu(x G^T) * (x U^T) of Llama's MLP (SwiGLU, arXiv 2002.05202).

On a CPU one row is a product of a matrix and a vector, and torch has a quicker way for it than for a matrix of one row:
for bfloat16 on two cores of a Xeon with AMX, 1.4 ms and not 2.5 for the head of SmolLM2, 0.18 and not 0.26 for its MLP.
A few rows of float32 are W x^T: with the long side first it reads W better. All products of SmolLM2 with 2, 4, 8 and 32
rows take 65, 71, 105 and 207 ms on two cores of an EPYC (AVX2), and 99, 103, 200 and 525 with x first.

On a GPU a product of few rows takes as long as reading W, once. The Triton path is for those; cuBLAS does the rest, and
whatever it does better. A program makes some outputs of all rows and walks `in`; products are summed in float32 and
rounded once. A tile is a way to cut the product; which one is used is a table, filled from `tools/bench_kernels.py`.
With one tile a row's result does not depend on the other rows; another tile may differ from it in the last bit.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minserve.kernels.lang import tl, triton
from minserve.kernels.silu_mul import silu_mul

CPU_FEW_ROWS = 32

MAX_ROWS = 64
"""More rows are work for cuBLAS: the product is no longer bound by reading W."""


class Tile(NamedTuple):
    """How the Triton path cuts a product. `in` has to be a multiple of block_k * splits.

    block_n: rows of W that a program reads; block_k: how much of `in` at a time. Both are powers of two.
    num_stages: how many pieces [block_n, block_k] of W are in flight.
    tensor_cores: multiply with tl.dot, x padded to 16 rows; else multiply and add, for one row only.
    splits: programs that share an output, each with its part of `in`; a second kernel adds the parts up, in order.
    ahead: above 0, the kernel starts while the one before it still runs, and asks for so many pieces of W until that
    one has ended (programmatic dependent launch, Hopper and later). Right behind any kernel; of most use if that one
    lets its successor start early too.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tensor_cores: bool = True
    splits: int = 1
    ahead: int = 0


class Choice(NamedTuple):
    """A tile for up to so many rows and outputs, and inputs of at least so many."""

    max_rows: int
    max_out: int
    tile: Tile
    min_in: int = 0


# What no line is for is cuBLAS's. `python tools/bench_kernels.py linear` prints lines; the first that fits is taken.
# Measured on an H200 at Qwen3-8B's sizes: all products of a step of 1, 4, 16 rows take 3.68, 3.84, 3.89 ms, by cuBLAS
# 4.12, 4.13, 4.14; reading their weights takes 3.44.
LINEAR_CHOICES: tuple[Choice, ...] = (
    Choice(1, 4096, Tile(16, 256, 4, 5, tensor_cores=False)),
    Choice(1, 6144, Tile(8, 512, 4, 1, tensor_cores=False)),
    Choice(1, 32768, Tile(4, 1024, 4, 1, tensor_cores=False)),
    Choice(16, 6144, Tile(64, 256, 4, 4)),
    Choice(16, 32768, Tile(128, 128, 4, 3)),
    Choice(16, 2**18, Tile(64, 128, 4, 4)),
    Choice(32, 6144, Tile(64, 128, 4, 6)),
    Choice(64, 4096, Tile(64, 128, 4, 6, splits=2), min_in=8192),
)
SILU_MUL_CHOICES: tuple[Choice, ...] = (
    Choice(1, 16384, Tile(4, 1024, 4, 1, tensor_cores=False)),
    Choice(16, 16384, Tile(128, 128, 4, 3)),
    Choice(32, 16384, Tile(128, 64, 4, 5)),
)


def choose_tile(choices: tuple[Choice, ...], rows: int, size_in: int, size_out: int) -> Tile | None:
    """The tile to multiply [rows, in] with on the GPU; None where torch should."""
    for choice in choices:
        fits = size_in >= choice.min_in and size_in % (choice.tile.block_k * choice.tile.splits) == 0
        if 0 < rows <= choice.max_rows and size_out <= choice.max_out and fits:
            return choice.tile
    return None


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [rows, in]; weight: [out, in]; bias: [out]. Returns [rows, out]."""
    rows = x.shape[0]
    if x.device.type == "cpu" and 1 < rows <= CPU_FEW_ROWS and x.dtype == torch.float32:
        out = torch.mm(weight, x.t()).t().contiguous()
        return out if bias is None else out.add_(bias)
    if x.device.type != "cpu" or rows != 1:
        return F.linear(x, weight, bias)
    row = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
    return row[None]


def linear_silu_mul_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [rows, in]; weight: [2 * size, in], rows of the gate first; bias: [2 * size]. Returns [rows, size].

    The projections are rounded to x's dtype in between, which the Triton path does not do.
    """
    return silu_mul(linear(x, weight, bias))


@triton.jit
def _weight_rows(size_out, gated: tl.constexpr, block_n: tl.constexpr):
    """[block_n] int64: the rows of W that this program multiplies with. gated: gate, up, gate, up ..., so that the two
    that belong together end up side by side. Past the end the last ones are repeated, and loads need no mask."""
    i = tl.arange(0, block_n)
    if gated:
        n = tl.program_id(0) * (block_n // 2) + i // 2
        n = tl.minimum(n, size_out - 1) + (i % 2) * size_out
    else:
        n = tl.minimum(tl.program_id(0) * block_n + i, size_out - 1)
    return n.to(tl.int64)


@triton.jit
def _store(
    sums,
    bias,
    out,
    rows,
    size_out,
    n,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    padded_rows: tl.constexpr,
    block_n: tl.constexpr,
):
    """sums: [padded_rows, block_n] float32, the products with rows n of W."""
    if has_bias:
        sums += tl.load(bias + n).to(tl.float32)[None, :]
    if gated:
        gate, up = tl.split(tl.reshape(sums, [padded_rows, block_n // 2, 2]))
        result = gate / (1.0 + tl.exp(-gate)) * up
        column = tl.program_id(0) * (block_n // 2) + tl.arange(0, block_n // 2)
    else:
        result = sums
        column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    row = tl.arange(0, padded_rows)[:, None]
    at = out + row.to(tl.int64) * size_out + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(row < rows) & (column[None, :] < size_out))


@triton.jit
def _overlap(weight_at, ahead: tl.constexpr, block_k: tl.constexpr):
    """Let the kernel behind start, and wait for the one before. W is written by neither, so its first pieces are on
    their way to L2 meanwhile: a volatile load is not left out although nobody uses what it loads."""
    tl.extra.cuda.gdc_launch_dependents()
    for piece in tl.static_range(ahead):
        tl.load(weight_at + piece * block_k, volatile=True)
    tl.extra.cuda.gdc_wait()


@triton.jit
def _vector_kernel(
    x,
    weight,
    bias,
    out,
    size_in,
    size_out,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    ahead: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
):
    """One row, without tensor cores."""
    n = _weight_rows(size_out, gated, block_n)
    k = tl.arange(0, block_k)
    weight_at = weight + n[:, None] * size_in + k[None, :]
    if ahead > 0:
        _overlap(weight_at, ahead, block_k)
    products = tl.zeros([block_n, block_k], tl.float32)
    # num_stages as an argument of the launch is for loops around tl.dot only.
    for start in tl.range(0, size_in, block_k, num_stages=stages):
        w = tl.load(weight_at + start, eviction_policy="evict_first").to(tl.float32)
        products += w * tl.load(x + start + k).to(tl.float32)[None, :]
    _store(tl.sum(products, 1)[None, :], bias, out, 1, size_out, n, has_bias, gated, 1, block_n)


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    size_in,
    size_out,
    span,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    ahead: tl.constexpr,
    padded_rows: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Grid (tiles of outputs, splits); span: how much of `in` a split takes; padded_rows: rows, padded."""
    split = tl.program_id(1)
    n = _weight_rows(size_out, gated, block_n)
    row = tl.arange(0, padded_rows)[None, :]
    k = split * span + tl.arange(0, block_k)
    weight_at = weight + n[:, None] * size_in + k[None, :]
    # W is the left factor, which tensor cores want tall; x, transposed by its addresses, is the one that may be narrow.
    x_at = x + row * size_in + k[:, None]
    if ahead > 0:
        _overlap(weight_at, ahead, block_k)
    sums = tl.zeros([block_n, padded_rows], tl.float32)
    for start in range(0, span, block_k):
        w = tl.load(weight_at + start, eviction_policy="evict_first")
        piece = tl.load(x_at + start, mask=row < rows, other=0.0)
        sums = tl.dot(w, piece, sums, input_precision="ieee")
    part = out + split.to(tl.int64) * rows * size_out
    _store(tl.trans(sums), bias, part, rows, size_out, n, has_bias, gated, padded_rows, block_n)


@triton.jit(do_not_specialize=["splits", "size"])
def _add_splits_kernel(
    parts, bias, out, splits, size, size_out, has_bias: tl.constexpr, ahead: tl.constexpr, block: tl.constexpr
):
    """parts: [splits, size] float32; out: [size], rows of size_out."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    if ahead > 0:
        _overlap(parts, 0, block)
    sums = tl.zeros([block], tl.float32)
    part = parts + i
    for _ in range(splits):
        sums += tl.load(part, mask=i < size, other=0.0)
        part += size
    if has_bias:
        sums += tl.load(bias + i % size_out, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + i, sums.to(out.dtype.element_ty), mask=i < size)


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, gated: bool) -> torch.Tensor:
    _check(x, weight, bias)
    rows, size_in = x.shape
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    has_bias = bias is not None
    assert not gated or (weight.shape[0] % 2 == 0 and tile.splits == 1), (weight.shape, tile)
    assert rows <= (MAX_ROWS if tile.tensor_cores else 1), (rows, tile)
    assert size_in % (tile.block_k * tile.splits) == 0, (size_in, tile)
    assert tile.ahead * tile.block_k * tile.splits <= size_in, (size_in, tile)

    out = x.new_empty(rows, size_out)
    grid = (triton.cdiv(weight.shape[0], tile.block_n), tile.splits)
    if not tile.tensor_cores:
        assert tile.splits == 1, tile
        blocks = (tile.block_n, tile.block_k, tile.num_stages)
        _vector_kernel[grid](
            x, weight, bias, out, size_in, size_out, has_bias, gated, tile.ahead, *blocks, **_options(tile)
        )
    elif tile.splits == 1:
        _launch_dot(grid, x, weight, bias, out, gated, tile)
    else:
        parts = x.new_empty(tile.splits, rows, size_out, dtype=torch.float32)
        _launch_dot(grid, x, weight, None, parts, gated, tile)
        block, size = 512, out.numel()
        _add_splits_kernel[(triton.cdiv(size, block),)](
            parts, bias, out, tile.splits, size, size_out, has_bias, tile.ahead, block, **_options(tile)
        )
    return out


def _launch_dot(
    grid: tuple[int, int],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool,
    tile: Tile,
) -> None:
    rows, size_in = x.shape
    padded_rows = max(16, triton.next_power_of_2(rows))
    sizes = (rows, size_in, out.shape[-1], size_in // tile.splits)
    blocks = (padded_rows, tile.block_n, tile.block_k)
    _dot_kernel[grid](x, weight, bias, out, *sizes, bias is not None, gated, tile.ahead, *blocks, **_options(tile))


def _options(tile: Tile) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    # Triton's interpreter does not know this one, so it is named only where it is wanted.
    return options | {"launch_pdl": True} if tile.ahead else options


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert x.dim() == 2, x.shape
    assert weight.dim() == 2, weight.shape
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype and bias.is_contiguous())


def linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    """As linear_reference, for up to MAX_ROWS rows."""
    return _launch(x, weight, bias, tile, gated=False)


def linear_silu_mul_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile
) -> torch.Tensor:
    """As linear_silu_mul_reference, for up to MAX_ROWS rows; a program makes block_n / 2 outputs."""
    return _launch(x, weight, bias, tile, gated=True)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [rows, in]; weight: [out, in]; bias: [out]; one dtype. Returns [rows, out] of it."""
    tile = _choose(LINEAR_CHOICES, x, weight.shape[0])
    return linear_reference(x, weight, bias) if tile is None else linear_triton(x, weight, bias, tile)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu of the first half of `linear`, times its second half.

    x: [rows, in]; weight: [2 * size, in], rows of the gate first; bias: [2 * size]; one dtype. Returns [rows, size].
    """
    tile = _choose(SILU_MUL_CHOICES, x, weight.shape[0] // 2)
    return linear_silu_mul_reference(x, weight, bias) if tile is None else linear_silu_mul_triton(x, weight, bias, tile)


def _choose(choices: tuple[Choice, ...], x: torch.Tensor, size_out: int) -> Tile | None:
    # Tiles are measured with 16-bit weights.
    return choose_tile(choices, x.shape[0], x.shape[1], size_out) if x.is_cuda and x.itemsize == 2 else None
