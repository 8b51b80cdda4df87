"""Products of some hundred rows, for a GPU on which blocks are fetched meanwhile: x W^T + b, and silu(x G^T) * (x U^T).

cuBLAS's programs take all registers of an SM. One that a fetch is on, with a single warp, is missing then, and what
should have run there runs when all the others are done. These programs leave room for fetch_blocks.py's on every SM.

Each takes an equal share of the work, whatever the number of tiles (stream-K, arXiv 2301.03598): of all pieces of
block_k, of one tile of outputs after the other, program p does the p-th share. So W is read from memory once, and a
tile may be shared by neighbours, each of which leaves its part of the sum in a slot. A second kernel adds the parts up,
in float32 and in order, and rounds once. With several tiles of rows, programs side by side walk the same W, and shares
are larger: then a row's last bit may depend on how many tiles there are.

A program multiplies with all rows of its tile at once: W is the left factor, of block_n rows, since tensor cores want
that one tall, and x the right one, whose padding is the smaller for being a sum of two powers of two.
"""

from importlib import import_module

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.linear_tiles import Tile

REGISTERS = 184
"""Of a thread, with 256 threads an SM: a quarter of an SM keeps room for two programs of a fetch (72 registers)."""

ROWS_AT_ONCE = 64
"""That are stored; more would need more registers than the sums themselves."""

ADDED_ROWS, ADDED_WIDTH = 8, 128
"""That a program of the second kernel adds up."""


@triton.jit
def _store_part(
    sums, part, tile, first_row, rows, size_out, block_m: tl.constexpr, block_n: tl.constexpr, at_once: tl.constexpr
):
    """sums: [block_n, block_m] float32, of the tile's outputs and of rows of x from first_row on."""
    if block_m > at_once:
        half: tl.constexpr = block_m // 2
        low, high = tl.split(tl.permute(tl.reshape(sums, [block_n, 2, half]), [0, 2, 1]))
        _store_part(low, part, tile, first_row, rows, size_out, half, block_n, at_once)
        _store_part(high, part, tile, first_row + half, rows, size_out, half, block_n, at_once)
    else:
        row = first_row + tl.arange(0, block_m)[None, :]
        n = tile * block_n + tl.arange(0, block_n)[:, None]
        tl.store(part + row.to(tl.int64) * size_out + n, sums, mask=(row < rows) & (n < size_out))


@triton.jit(do_not_specialize=["rows", "row_tiles", "share"])
def _wide_kernel(
    x, x_rest, weight, parts, rows, row_tiles, size_in, size_out, share, ahead: tl.constexpr, block_m: tl.constexpr,
    rest: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """x, x_rest: descriptors of [rows, in], for pieces of block_m rows, and of the rest behind these, which may be 0.
    parts: [slots, rows, out] float32."""
    first_row = tl.program_id(0) % row_tiles * (block_m + rest)
    number = tl.program_id(0) // row_tiles
    steps = size_in // block_k
    begin = number * share
    end = tl.minimum(begin + share, tl.cdiv(size_out, block_n) * steps)
    # The registers are full: what does not change from tile to tile is computed again, neither by Triton before this
    # loop nor, behind a condition that always holds, by the compilers after it.
    for tile in tl.range(begin // steps, tl.cdiv(end, steps), disable_licm=True):
        n = tl.minimum(tile * block_n + tl.arange(0, block_n), size_out - 1).to(tl.int64)
        weight_at = weight + n[:, None] * size_in + tl.arange(0, block_k)[None, :]
        low = tl.maximum(begin - tile * steps, 0) * block_k
        high = tl.minimum(end - tile * steps, steps) * block_k
        sums = tl.zeros([block_n, block_m], tl.float32)
        if rest > 0:
            sums_rest = tl.zeros([block_n, rest], tl.float32)
        for k in tl.range(low, high, block_k, num_stages=stages):
            w = tl.load(weight_at + k, eviction_policy="evict_first")
            sums = tl.dot(w, x.load([first_row, k]).T, sums, input_precision="ieee")
            if rest > 0:
                sums_rest = tl.dot(w, x_rest.load([first_row + block_m, k]).T, sums_rest, input_precision="ieee")
        if low < high:
            part = parts + (number - tile * steps // share).to(tl.int64) * rows * size_out
            _store_part(sums, part, tile, first_row, rows, size_out, block_m, block_n, at_once)
            if rest > 0:
                _store_part(sums_rest, part, tile, first_row + block_m, rows, size_out, rest, block_n, at_once)
    if ahead > 0:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _add_parts(parts, bias, row, n, rows, size_out, steps, share, slots, has_bias: tl.constexpr, block_n: tl.constexpr):
    """For outputs n of a row, both of which may be past the end."""
    tile = n // block_n
    count = ((tile + 1) * steps - 1) // share - tile * steps // share + 1
    part = parts + row.to(tl.int64) * size_out + n
    sums = tl.zeros(part.shape, tl.float32)
    for slot in range(slots):
        sums += tl.load(part, mask=(row < rows) & (n < size_out) & (slot < count), other=0.0)
        part += rows.to(tl.int64) * size_out
    if has_bias:
        sums += tl.load(bias + n, mask=n < size_out, other=0.0).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["rows", "steps", "share", "slots"])
def _finish_kernel(
    parts, bias, out, rows, size_out, steps, share, slots, has_bias: tl.constexpr, gated: tl.constexpr,
    ahead: tl.constexpr, block_n: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """size_out: outputs of the product; gated: the gates, and as many that go up."""
    row = tl.program_id(1) * height + tl.arange(0, height)[:, None]
    n = tl.program_id(0) * width + tl.arange(0, width)[None, :]
    size = size_out // 2 if gated else size_out
    if ahead > 0:
        tl.extra.cuda.gdc_wait()
    result = _add_parts(parts, bias, row, n, rows, size_out, steps, share, slots, has_bias, block_n)
    if gated:
        up = _add_parts(parts, bias, row, n + size, rows, size_out, steps, share, slots, has_bias, block_n)
        result = result / (1.0 + tl.exp(-result)) * up
    tl.store(out + row.to(tl.int64) * size + n, result.to(out.dtype.element_ty), mask=(row < rows) & (n < size))


def wide_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, gated: bool
) -> torch.Tensor:
    """As linear_reference, or linear_silu_mul_reference if gated, for any rows; the caller has checked the tensors."""
    (rows, size_in), size_out = x.shape, weight.shape[0]
    block_m = 1 << (tile.block_m.bit_length() - 1)
    rest = tile.block_m - block_m
    assert all(size >= 16 and size & (size - 1) == 0 for size in (block_m, rest or block_m)), tile
    assert (size_in % tile.block_k, tile.splits, tile.tensor_cores) == (0, 1, True), (size_in, tile)

    row_tiles, tiles, steps = -(-rows // tile.block_m), -(-size_out // tile.block_n), size_in // tile.block_k
    share = -(-tiles * steps // max(1, tile.programs // row_tiles))
    slots = -(-(steps - 1) // share) + 1
    out = x.new_empty(rows, size_out // 2 if gated else size_out)
    parts = x.new_empty(slots, rows, size_out, dtype=torch.float32)
    describe = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    pieces = (describe(x, [size, tile.block_k]) for size in (block_m, rest or block_m))
    _wide_kernel[(row_tiles * -(-tiles * steps // share),)](
        *pieces, weight, parts, rows, row_tiles, size_in, size_out, share, tile.ahead, block_m, rest, tile.block_n,
        tile.block_k, tile.num_stages, ROWS_AT_ONCE, num_warps=tile.num_warps, maxnreg=REGISTERS,
    )  # fmt: skip
    _finish_kernel[(triton.cdiv(out.shape[1], ADDED_WIDTH), triton.cdiv(rows, ADDED_ROWS))](
        parts, bias, out, rows, size_out, steps, share, slots, bias is not None, gated, tile.ahead, tile.block_n,
        ADDED_ROWS, ADDED_WIDTH, **({"launch_pdl": True} if tile.ahead else {}),
    )  # fmt: skip
    return out
