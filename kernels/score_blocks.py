"""The attention logit that a query head may expect to find in each block, from the extremes of the blocks' keys.

    logit = sum over slow d of (q_d c_d + 0.7 |q_d| w_d) / sqrt(head_dim)     c = (min + max) / 2, w = (max - min) / 2

with min, max and the slow coordinates as in build_digests.py. With 1 in place of 0.7 it would be the least upper bound
of what these coordinates give to q . k for any key k of the block (Quest, arXiv 2406.10774), which says more of its
spread than of what is in it; tools/NOTES.md, "What the ranking misses", has the alternatives. It is good for telling
which blocks are worth a second look (shortlist_blocks.py, score_keys.py). It is linear in the extremes. So all logits
of a KV head are one product, of its extremes by the weights of its queries, which are vectors twice as long as there
are slow coordinates, with u = UPPER:

    [u min(q, 0) + (1 - u) max(q, 0), u max(q, 0) + (1 - u) min(q, 0)] . [min, max]

On a GPU, where queries have 16 bits, tensor cores multiply E4M3 as it is, by weights in two parts of E4M3. A head's
weights are scaled so that the greatest is E4M3's greatest, w = scale (high + low), high being the nearest to w / scale
and low the nearest to what is left. So a weight is off by 2^-8 of itself at most, or by 2^-19 of the greatest; as
bfloat16 it would be by 2^-9. Hopper's tensor cores add up products of 8 bits with 13 bits or so, of the greatest
partial sum. Wider extremes are multiplied as float16, and of float32 queries all is float32.

Two rows of each lane are looked at together, so that extremes are read once: the lookahead row, which says what the
next step wants, and the normal row, which says what this one would have wanted. rank_blocks.py says it of a whole
group.

Ranked are the blocks [1, end) that have a digest: block 0 is pinned and what is in the ring is at hand. A logit is -inf
just where a block is not ranked.
"""

from typing import Any

import torch

from minserve.kernels.build_digests import extremes_shape, slow_column, slow_coordinates
from minserve.kernels.fp8 import FP8_MAX
from minserve.kernels.lang import tl, triton

LOOKAHEAD, NORMAL = 0, 1
"""The rows."""

MOST = 1e4
"""No logit is further from zero; one that is no number is the worst, but ranked."""

UPPER = 0.85
"""How much the upper bound counts; the lower bound has the rest."""

TILE, NUM_WARPS, NUM_STAGES = 128, 4, 3
"""Blocks that a program scores at a time, its warps, and stages."""

PROGRAMS = 512
"""How many programs are enough to keep a GPU reading."""


def logit_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the logits of queries of this dtype. Half of float16's spacing is a tenth of what E4M3 moves a logit by."""
    return torch.float16 if dtype.itemsize == 2 else torch.float32


def empty_logits(queries: torch.Tensor, kv_heads: int, num_blocks: int) -> torch.Tensor:
    """What `score_blocks` fills. On a GPU a block has room for a power of two of heads, so that a thread reads all."""
    group = queries.shape[2] // kv_heads
    shape = (*queries.shape[:2], kv_heads, num_blocks, triton.next_power_of_2(group))
    return queries.new_empty(shape, dtype=logit_dtype(queries.dtype))[..., :group]


def score_blocks(
    queries: torch.Tensor, extremes: torch.Tensor, digest_table: torch.Tensor, lanes: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Returns logits, [entries, 2 (lookahead, normal), kv_heads, blocks, heads / kv_heads], of the dtype above.

    queries: [entries, 2, heads, head_dim], after RoPE; on a CPU one row, too, which stands for both
    extremes: [places, kv_heads, 2 (min, max), head_dim / 2], one layer's, of numbers of E4M3
    digest_table: [num_lanes, blocks] int32, the place of each block's digest, -1: none; anything behind a lane's end.
        It may be the first columns of a wider table: as many as `end` needs.
    lanes: [entries] int64, -1: padding, for which nothing is ranked
    end: [entries] int64, one behind the last block that is ranked: the first of the ring, and 0 for who is not sparse.
        On a GPU, what lies behind it costs nothing but the -inf that is written.
    """
    entries, rows, heads, head_dim = queries.shape
    kv_heads = extremes.shape[1]
    assert (rows in (1, 2), rows == 2 or not queries.is_cuda, heads % kv_heads) == (True, True, 0), queries.shape
    assert extremes.shape[1:] == extremes_shape(kv_heads, head_dim), (queries.shape, extremes.shape)
    assert (digest_table.dim(), digest_table.dtype) == (2, torch.int32), (digest_table.shape, digest_table.dtype)
    assert digest_table.stride(1) == 1, digest_table.stride()
    assert lanes.shape == end.shape == (entries,), (lanes.shape, end.shape, queries.shape)
    assert lanes.dtype == end.dtype == torch.int64, (lanes.dtype, end.dtype)
    assert all(tensor.is_contiguous() for tensor in (queries, extremes, lanes, end))
    run = score_blocks_triton if queries.is_cuda else score_blocks_reference
    return run(queries, extremes, digest_table, lanes, end)


def score_blocks_reference(
    queries: torch.Tensor, extremes: torch.Tensor, digest_table: torch.Tensor, lanes: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    entries, rows, _, head_dim = queries.shape
    kv_heads, num_blocks = extremes.shape[1], digest_table.shape[1]
    places = digest_table[lanes.clamp_min(0)]
    block = torch.arange(num_blocks, device=lanes.device)
    ranked = (lanes >= 0)[:, None] & (block >= 1) & (block < end[:, None]) & (places >= 0)

    grouped = slow_coordinates(queries.to(torch.float32)).view(entries, rows, kv_heads, -1, head_dim // 2)
    grouped = grouped.transpose(1, 2).flatten(2, 3)
    below, above = grouped.clamp_max(0), grouped.clamp_min(0)
    weights = torch.cat((above.lerp(below, UPPER), below.lerp(above, UPPER)), dim=-1)
    # What a table holds where nothing is ranked may be no place. Head by head, as that is how products read them.
    places = torch.where(ranked, places, 0).to(torch.int64)[:, None, :]
    source = places * kv_heads + torch.arange(kv_heads, device=lanes.device)[:, None]
    found = extremes.view(-1, head_dim).index_select(0, source.flatten()).to(torch.float32)
    # [entries, kv_heads, rows * group, blocks]
    logits = weights @ found.view(entries, kv_heads, num_blocks, -1).transpose(2, 3)
    logits = logits.mul_(head_dim**-0.5).nan_to_num_(nan=-MOST).clamp_(-MOST, MOST)
    logits.masked_fill_(~ranked[:, None, None, :], -torch.inf)
    logits = logits.view(entries, kv_heads, rows, -1, num_blocks).permute(0, 2, 1, 4, 3)
    return logits.to(logit_dtype(queries.dtype))  # a view: on a CPU a head's logits stay side by side


@triton.jit
def _load_weights(
    q, row_stride, column, upper: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, width: tl.constexpr
):
    """What extremes are multiplied by: [width, columns] float32, a column for each head of one row, then of the other,
    then zeros. q: the first row's first head of a group; column: [columns]; width: head_dim, padded by zeros."""
    side = tl.arange(0, width)[:, None]  # the slow coordinates, for min, and again for max
    half: tl.constexpr = head_dim // 2
    source = (q + column // group * row_stride + column % group * head_dim)[None, :]
    is_known = (column < 2 * group)[None, :] & (side < head_dim)
    x = tl.load(source + slow_column(side % half, head_dim), mask=is_known, other=0.0).to(tl.float32)
    return x * tl.where((x < 0) == (side < half), upper, 1 - upper)


@triton.jit
def _split(weights, is_low, dtype: tl.constexpr, largest: tl.constexpr) -> Any:
    """(numbers of 8 bits, scale of each column). Columns come in pairs of the same weights: where one is low, it is
    what rounding has taken off the other."""
    scale = tl.maximum(tl.max(tl.abs(weights), 0), 1e-30) / largest
    weights *= (1.0 / scale)[None, :]
    high = weights.to(dtype).to(tl.float32)
    return tl.where(is_low[None, :], weights - high, high).to(dtype), scale


@triton.jit(do_not_specialize=["num_blocks", "table_stride"])
def _score_blocks_kernel(
    queries, extremes, digest_table, lanes, end, logits, num_blocks, table_stride,
    scale: tl.constexpr, most: tl.constexpr, upper: tl.constexpr, largest: tl.constexpr, kv_heads: tl.constexpr,
    group: tl.constexpr, head_dim: tl.constexpr, members: tl.constexpr, columns: tl.constexpr, width: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """One program for both rows of one KV head of an entry, and its share of the blocks, a tile at a time. Heads come
    first, since their extremes lie side by side. members, columns, width: group, 2 * group and head_dim, padded."""
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads
    num_splits = tl.num_programs(0) // kv_heads
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + entry)
    last = tl.minimum(tl.where(lane >= 0, tl.load(end + entry), 0), num_blocks)
    last = tl.maximum(last, 0).to(tl.int32)
    t = tl.arange(0, tile)
    column = tl.arange(0, columns)[None, :]  # as in weights
    is_head = column < 2 * group
    out = logits + ((entry * 2 + column // group) * kv_heads + head) * num_blocks * members + column % group

    # Splits share what lies behind the end, and what lies before, the latter in whole tiles.
    share = (num_blocks - last + num_splits - 1) // num_splits
    first = last + split * share
    stop = tl.minimum(first + share, num_blocks)
    for start in range(first, stop, tile):
        block = start + t
        worst = tl.full([tile, columns], -float("inf"), logits.dtype.element_ty)
        tl.store(out + block[:, None] * members, worst, mask=(block < stop)[:, None] & is_head)
    share = ((last + num_splits - 1) // num_splits + tile - 1) // tile * tile
    first = split * share
    stop = tl.minimum(first + share, last)
    if first >= stop:
        return

    table = digest_table + lane * table_stride
    place = tl.load(table + first + t, mask=(first + t >= 1) & (first + t < stop), other=-1)
    is_short: tl.constexpr = queries.dtype.element_ty.primitive_bitwidth == 16
    halves: tl.constexpr = 2 if is_short and extremes.dtype.element_ty.primitive_bitwidth == 8 else 1
    column = tl.arange(0, halves * columns)
    q = queries + (entry * 2 * kv_heads + head) * (group * head_dim)
    weights = _load_weights(q, kv_heads * group * head_dim, column % columns, upper, group, head_dim, width)
    if halves == 2:
        weights, scales = _split(weights, column >= columns, extremes.dtype.element_ty, largest)
        scales *= scale
    else:
        weights = weights.to(tl.float16 if is_short else tl.float32)
        scales = tl.full([columns], scale, tl.float32)
    side = tl.arange(0, width)[None, :]
    # Places are looked up a tile ahead, as pages are in decode_attention.py.
    for start in range(first, stop, tile):
        block = start + t
        ranked = tl.load(table + block, mask=(block >= 1) & (block < stop), other=-1) >= 0
        # What is not ranked reads a place that there is.
        source = (tl.maximum(place, 0).to(tl.int64) * kv_heads + head) * head_dim
        place = tl.load(table + block + tile, mask=block + tile < stop, other=-1)
        extreme = tl.load(extremes + source[:, None] + side, mask=side < head_dim, other=0.0)
        logit = tl.dot(extreme.to(weights.dtype), weights, input_precision="ieee")
        logit = tl.sum(tl.reshape(logit * scales[None, :], [tile, halves, columns]), 1)
        logit = tl.minimum(tl.maximum(logit, -most), most)  # of a number and none, the number
        logit = tl.where(ranked[:, None], logit, -float("inf"))
        tl.store(out + block[:, None] * members, logit, mask=(block < stop)[:, None] & is_head)


def choose_splits(num_pairs: int, num_blocks: int, tile: int) -> int:
    """How many programs share the blocks of each of num_pairs (entry, KV head) pairs, by shapes alone, since a CUDA
    graph keeps the grid."""
    return max(1, min(-(-PROGRAMS // max(num_pairs, 1)), -(-num_blocks // tile)))


def score_blocks_triton(
    queries: torch.Tensor,
    extremes: torch.Tensor,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    end: torch.Tensor,
    *,
    splits: int | None = None,
) -> torch.Tensor:
    entries, rows, heads, head_dim = queries.shape
    assert rows == 2, queries.shape  # so many are written
    kv_heads, num_blocks = extremes.shape[1], digest_table.shape[1]
    group = heads // kv_heads
    tile = TILE if queries.itemsize == 2 else 16  # float32 is for tests: both factors are in registers
    if splits is None:
        splits = choose_splits(entries * kv_heads, num_blocks, tile)
    logits = empty_logits(queries, kv_heads, num_blocks)
    columns, width = max(triton.next_power_of_2(2 * group), 8), max(triton.next_power_of_2(head_dim), 32)
    _score_blocks_kernel[(splits * kv_heads, entries)](
        queries, extremes, digest_table, lanes, end, logits, num_blocks, digest_table.stride(0),
        head_dim**-0.5, MOST, UPPER, FP8_MAX, kv_heads, group, head_dim, logits.stride(3), columns, width, tile,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return logits
