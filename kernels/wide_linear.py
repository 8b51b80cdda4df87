"""Products of some hundred rows, for a GPU on which blocks are fetched meanwhile: x W^T + b, and silu(x G^T) * (x U^T).

cuBLAS's programs take all registers of an SM. One that a fetch is on, with a single warp, is missing then, and what
should have run there runs when all the others are done. These programs leave room for fetch_blocks.py's on every SM.

Each takes an equal share of the work, whatever the number of tiles (stream-K, arXiv 2301.03598): of all pieces of
block_k, of one tile of outputs after the other, program p does the p-th share. So each W is read from memory once, and a
tile's sum may be shared by neighbours: then their parts, in float32, are added up by a second kernel, in order, and
rounded once. If there are several tiles of rows, programs side by side walk the same W.

A program multiplies with all rows of its tile at once: W is the left factor, of block_n rows, since tensor cores want
that one tall, and x the right one, whose padding is the smaller for being a sum of two powers of two.
"""

from importlib import import_module
from typing import Any

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.linear_tiles import Tile

REGISTERS = 184
"""Of a thread, with 256 threads an SM: a quarter of an SM keeps room for two programs of a fetch (72 registers)."""

ROWS_AT_ONCE = 64
"""That are stored; more would need more registers than the sums themselves."""

NUMBERS = 1024
"""That a program of the second kernel adds up."""


@triton.jit
def _rows_of_weight(tile, size_out, gated: tl.constexpr, block_n: tl.constexpr):
    """[block_n] int64: the rows of W that make a tile. gated: eight of the gate, then the eight of up that belong to
    them, as tensor cores leave rows i and i + 8 with the same thread. Past the end the last ones are repeated."""
    i = tl.arange(0, block_n)
    if gated:
        n = tl.minimum(tile * (block_n // 2) + i // 16 * 8 + i % 8, size_out - 1) + i // 8 % 2 * size_out
    else:
        n = tl.minimum(tile * block_n + i, size_out - 1)
    return n.to(tl.int64)


@triton.jit
def _store(
    sums, out, tile, first_row, rows, size_out, gated: tl.constexpr, block_n: tl.constexpr, block_m: tl.constexpr,
    at_once: tl.constexpr,
):  # fmt: skip
    """sums: [block_n, block_m] float32, of the tile's rows of W and of rows of x from first_row on."""
    if block_m > at_once:
        half: tl.constexpr = block_m // 2
        low, high = tl.split(tl.permute(tl.reshape(sums, [block_n, 2, half]), [0, 2, 1]))
        _store(low, out, tile, first_row, rows, size_out, gated, block_n, half, at_once)
        _store(high, out, tile, first_row + half, rows, size_out, gated, block_n, half, at_once)
    else:
        width: tl.constexpr = block_n // 2 if gated else block_n
        if gated:
            gate, up = tl.split(tl.permute(tl.reshape(sums, [block_n // 16, 2, 8, block_m]), [0, 2, 3, 1]))
            sums = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [width, block_m])
        column = tile * width + tl.arange(0, width)[:, None]
        row = first_row + tl.arange(0, block_m)[None, :]
        at = out + row.to(tl.int64) * size_out + column
        tl.store(at, sums.to(out.dtype.element_ty), mask=(row < rows) & (column < size_out))


@triton.jit
def _finish(
    sums, bias, out, parts, slot, tile, first_row, rows, size_out, whole, has_bias: tl.constexpr, gated: tl.constexpr,
    block_n: tl.constexpr, block_m: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """whole: the sums are complete; else they are what goes into a slot of parts."""
    if whole:
        if has_bias:
            sums += tl.load(bias + _rows_of_weight(tile, size_out, gated, block_n)).to(tl.float32)[:, None]
        _store(sums, out, tile, first_row, rows, size_out, gated, block_n, block_m, at_once)
    else:
        size = size_out * 2 if gated else size_out
        part = parts + slot.to(tl.int64) * rows * size
        _store(sums, part, tile, first_row, rows, size, False, block_n, block_m, at_once)


@triton.jit(do_not_specialize=["rows", "row_tiles", "share"])
def _wide_kernel(
    x, x_rest, weight, bias, out, parts, rows, row_tiles, size_in, size_out, share, has_bias: tl.constexpr,
    gated: tl.constexpr, ahead: tl.constexpr, block_m: tl.constexpr, rest: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, stages: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """x, x_rest: descriptors of [rows, in], for pieces of block_m rows, and of the rest behind these, which may be 0.
    parts: [slots, rows, outputs] float32, a tile's outputs in the order of its rows of W."""
    first_row = tl.program_id(0) % row_tiles * (block_m + rest)
    number = tl.program_id(0) // row_tiles
    steps = size_in // block_k
    tiles = tl.cdiv(size_out * 2 if gated else size_out, block_n)
    begin = number * share
    end = tl.minimum(begin + share, tiles * steps)
    # What does not change from tile to tile is computed again: the registers are full.
    for tile in tl.range(begin // steps, tl.cdiv(end, steps), disable_licm=True):
        n = _rows_of_weight(tile, size_out, gated, block_n)
        weight_at = weight + n[:, None] * size_in + tl.arange(0, block_k)[None, :]
        low = (tl.maximum(begin, tile * steps) - tile * steps) * block_k
        high = (tl.minimum(end, (tile + 1) * steps) - tile * steps) * block_k
        sums = tl.zeros([block_n, block_m], tl.float32)
        if rest > 0:
            sums_rest = tl.zeros([block_n, rest], tl.float32)
        for k in tl.range(low, high, block_k, num_stages=stages):
            w = tl.load(weight_at + k, eviction_policy="evict_first")
            sums = tl.dot(w, x.load([first_row, k]).T, sums, input_precision="ieee")
            if rest > 0:
                sums_rest = tl.dot(w, x_rest.load([first_row + block_m, k]).T, sums_rest, input_precision="ieee")
        slot, whole = number - tile * steps // share, high - low == size_in
        _finish(
            sums, bias, out, parts, slot, tile, first_row, rows, size_out, whole, has_bias, gated, block_n, block_m,
            at_once,
        )  # fmt: skip
        if rest > 0:
            _finish(
                sums_rest, bias, out, parts, slot, tile, first_row + block_m, rows, size_out, whole, has_bias, gated,
                block_n, rest, at_once,
            )  # fmt: skip
    if ahead > 0:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows", "steps", "share"])
def _add_parts_kernel(
    parts, bias, out, rows, size_out, steps, share, has_bias: tl.constexpr, gated: tl.constexpr, ahead: tl.constexpr,
    block_n: tl.constexpr, block_m: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, pieces of rows). What one program has summed is in its place already."""
    tile, first_row = tl.program_id(0), tl.program_id(1) * block_m
    if ahead > 0:
        tl.extra.cuda.gdc_wait()
    count = ((tile + 1) * steps - 1) // share - tile * steps // share + 1
    if count > 1:
        size = size_out * 2 if gated else size_out
        column = tile * block_n + tl.arange(0, block_n)[:, None]
        row = first_row + tl.arange(0, block_m)[None, :]
        part = parts + row.to(tl.int64) * size + column
        sums = tl.zeros([block_n, block_m], tl.float32)
        for _ in range(count):
            sums += tl.load(part, mask=(row < rows) & (column < size), other=0.0)
            part += rows.to(tl.int64) * size
        if has_bias:
            sums += tl.load(bias + _rows_of_weight(tile, size_out, gated, block_n)).to(tl.float32)[:, None]
        _store(sums, out, tile, first_row, rows, size_out, gated, block_n, block_m, block_m)


def wide_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, gated: bool
) -> torch.Tensor:
    """As linear_reference, or linear_silu_mul_reference if gated, for any rows; checked by the caller."""
    rows, size_in = x.shape
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = 1 << (tile.block_m.bit_length() - 1)
    rest = tile.block_m - block_m
    assert min(block_m, rest or block_m) >= 16 and rest & (rest - 1) == 0, tile
    assert size_in % tile.block_k == 0 and (tile.splits, tile.tensor_cores) == (1, True), (size_in, tile)
    assert weight.shape[0] % 16 == 0 or not gated, weight.shape

    row_tiles, tiles = triton.cdiv(rows, tile.block_m), triton.cdiv(weight.shape[0], tile.block_n)
    steps = size_in // tile.block_k
    share = triton.cdiv(tiles * steps, max(1, tile.programs // row_tiles))
    out = x.new_empty(rows, size_out)
    slots = 0 if share % steps == 0 else triton.cdiv(steps - 1, share) + 1
    parts = x.new_empty(slots, rows, weight.shape[0], dtype=torch.float32)
    describe = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    pieces = (describe(x, [size, tile.block_k]) for size in (block_m, rest or block_m))
    sizes = (rows, row_tiles, size_in, size_out, share, bias is not None, gated, tile.ahead)
    blocks = (block_m, rest, tile.block_n, tile.block_k, tile.num_stages, ROWS_AT_ONCE)
    options: dict[str, Any] = {"num_warps": tile.num_warps, "maxnreg": REGISTERS}
    _wide_kernel[(row_tiles * triton.cdiv(tiles * steps, share),)](
        *pieces, weight, bias, out, parts, *sizes, *blocks, **options
    )
    if slots:
        rows_at_once = NUMBERS // tile.block_n
        options = {"num_warps": 4} | ({"launch_pdl": True} if tile.ahead else {})
        _add_parts_kernel[(tiles, triton.cdiv(rows, rows_at_once))](
            parts, bias, out, rows, size_out, steps, share, *sizes[5:], tile.block_n, rows_at_once, **options
        )
    return out
