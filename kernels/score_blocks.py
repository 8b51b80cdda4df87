"""How much a query may find in each block, from the blocks' digests; and which blocks are wanted therefore.

    score(block) = sum over the query heads q of a KV head's group, over d, of max(q_d kmin_d, q_d kmax_d)

which is no less than the group's sum of q . k for any key k of the block (Quest, arXiv 2406.10774). For one head it is
linear in the digest, as is the lower bound, the sum of min(q_d kmin_d, q_d kmax_d). So all scores of a KV head are one
product, of its digests by the weights of its queries, which are vectors twice as long as a head, with u = UPPER:

    [u min(q, 0) + (1 - u) max(q, 0), u max(q, 0) + (1 - u) min(q, 0)] . [kmin, kmax]

On a GPU the weights are rounded to the digests' dtype: exact for u = 1, by 2^-9 at most in bfloat16 for others.

Two rows of each lane are scored at once, so that digests are read once: the lookahead row, which says what the next
step wants, and the normal row, which says what this one would have wanted.

Ranked are the blocks [1, end) that have a digest: block 0 is pinned and what is in the ring is at hand. A score is -inf
just where a block is not ranked.
"""

import math

import torch

from minserve.kernels.keep_best import keep_best, order_of_floats, row_shape
from minserve.kernels.lang import tl, triton

LOOKAHEAD, NORMAL = 0, 1
"""The rows."""

LEAST = torch.finfo(torch.float32).min
"""The score of a block whose sum is no number, or overflows: the worst, but ranked."""

UPPER = 1.0
"""How much the upper bound counts; the lower bound has the rest."""

BEST_HEAD = False
"""Whether a group's score is that of the head that finds most, instead of the sum."""

TILE, NUM_WARPS, NUM_STAGES = 64, 4, 2
"""Blocks that a program scores at a time, its warps, and stages: with two, more programs fit on an SM."""

PROGRAMS = 256
"""How many programs are enough to keep a GPU reading."""


def score_blocks(
    queries: torch.Tensor, digests: torch.Tensor, digest_table: torch.Tensor, lanes: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Returns [entries, 2 (lookahead, normal), kv_heads, blocks] float32.

    queries: [entries, 2, heads, head_dim], after RoPE
    digests: [places, kv_heads, 2 (min, max), head_dim], one layer's, of the same dtype
    digest_table: [num_lanes, blocks] int32, the place of each block's digest, -1: none; anything behind a lane's end.
        It may be the first columns of a wider table: as many as `end` needs.
    lanes: [entries] int64, -1: padding, for which nothing is ranked
    end: [entries] int64, one behind the last block that is ranked: the first of the ring, and 0 for who is not sparse.
        On a GPU, what lies behind it costs nothing but the -inf that is written.
    """
    entries, rows, heads, head_dim = queries.shape
    _, kv_heads, sides, _ = digests.shape
    assert (rows, sides, heads % kv_heads) == (2, 2, 0), (queries.shape, digests.shape)
    assert (digests.shape[3], digests.dtype) == (head_dim, queries.dtype), (queries.dtype, digests.shape, digests.dtype)
    assert (digest_table.dim(), digest_table.dtype) == (2, torch.int32), (digest_table.shape, digest_table.dtype)
    assert digest_table.stride(1) == 1, digest_table.stride()
    assert lanes.shape == end.shape == (entries,), (lanes.shape, end.shape, queries.shape)
    assert lanes.dtype == end.dtype == torch.int64, (lanes.dtype, end.dtype)
    assert all(tensor.is_contiguous() for tensor in (queries, digests, lanes, end))
    run = score_blocks_triton if queries.is_cuda else score_blocks_reference
    return run(queries, digests, digest_table, lanes, end)


def score_blocks_reference(
    queries: torch.Tensor, digests: torch.Tensor, digest_table: torch.Tensor, lanes: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    entries, rows, _, head_dim = queries.shape
    kv_heads, num_blocks = digests.shape[1], digest_table.shape[1]
    places = digest_table[lanes.clamp_min(0)]
    block = torch.arange(num_blocks, device=lanes.device)
    ranked = (lanes >= 0)[:, None] & (block >= 1) & (block < end[:, None]) & (places >= 0)

    grouped = queries.to(torch.float32).view(entries, rows, kv_heads, -1, head_dim)
    below, above = grouped.clamp_max(0), grouped.clamp_min(0)
    if not BEST_HEAD:
        below, above = below.sum(dim=3, keepdim=True), above.sum(dim=3, keepdim=True)
    weights = torch.cat((above.lerp(below, UPPER), below.lerp(above, UPPER)), dim=-1)
    # What a table holds where nothing is ranked may be no place. Head by head, as that is how products read them.
    places = torch.where(ranked, places, 0).to(torch.int64)[:, None, :]
    source = places * kv_heads + torch.arange(kv_heads, device=lanes.device)[:, None]
    found = digests.view(-1, 2 * head_dim).index_select(0, source.flatten()).to(torch.float32)
    # [entries, kv_heads, rows * (group or 1), blocks]
    scores = weights.transpose(1, 2).flatten(2, 3) @ found.view(entries, kv_heads, num_blocks, -1).transpose(2, 3)
    scores = scores.nan_to_num_(nan=LEAST, neginf=LEAST).view(entries, kv_heads, rows, -1, num_blocks).amax(dim=3)
    scores.masked_fill_(~ranked[:, None, None, :], -torch.inf)
    return scores.transpose(1, 2).contiguous()


@triton.jit
def _load_weights(
    q, row_stride, upper: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, members: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """What digests are multiplied by: [width, 2 * members] float32, a column for each head of one row, then of the
    other; members, width: group and 2 * head_dim, padded by zeros. q: the first row's first head of a group."""
    side = tl.arange(0, width)[:, None]
    column = tl.arange(0, 2 * members)[None, :]
    member = column % members
    source = q + column // members * row_stride + member * head_dim + side % head_dim
    x = tl.load(source, mask=(member < group) & (side < 2 * head_dim), other=0.0).to(tl.float32)
    return x * tl.where((x < 0) == (side < head_dim), upper, 1 - upper)


@triton.jit
def _over_group(score, group: tl.constexpr, members: tl.constexpr, worst: tl.constexpr, best_head: tl.constexpr):
    """A group's scores of its heads' [blocks, 2, members], of which `group` are heads: [blocks, 2]."""
    is_head = tl.arange(0, members)[None, None, :] < group
    if best_head:
        score = tl.where(score == score, score, worst)
        return tl.max(tl.where(is_head, score, -float("inf")), 2)
    else:
        return tl.sum(tl.where(is_head, score, 0.0), 2)


@triton.jit(do_not_specialize=["num_blocks", "table_stride"])
def _score_blocks_kernel(
    queries, digests, digest_table, lanes, end, scores, num_blocks, table_stride,
    worst: tl.constexpr, upper: tl.constexpr, best_head: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    head_dim: tl.constexpr, members: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One program for both rows of one KV head of an entry, and its share of the blocks, a tile at a time. Heads come
    first, since their digests lie side by side. members, width: group and 2 * head_dim, padded."""
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads
    num_splits = tl.num_programs(0) // kv_heads
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + entry)
    last = tl.minimum(tl.where(lane >= 0, tl.load(end + entry), 0), num_blocks)
    last = tl.maximum(last, 0).to(tl.int32)
    t = tl.arange(0, tile)
    out = scores + ((entry * 2 + tl.arange(0, 2)) * kv_heads + head)[None, :] * num_blocks

    # Splits share what lies behind the end, and what lies before, the latter in whole tiles.
    share = (num_blocks - last + num_splits - 1) // num_splits
    first = last + split * share
    stop = tl.minimum(first + share, num_blocks)
    for start in range(first, stop, tile):
        block = (start + t)[:, None]
        tl.store(out + block, tl.full([tile, 2], -float("inf"), tl.float32), mask=block < stop)
    share = ((last + num_splits - 1) // num_splits + tile - 1) // tile * tile
    first = split * share
    stop = tl.minimum(first + share, last)
    if first >= stop:
        return

    table = digest_table + lane * table_stride
    block = first + t
    place = tl.load(table + block, mask=(block >= 1) & (block < stop), other=-1)
    q = queries + (entry * 2 * kv_heads + head) * (group * head_dim)
    weights = _load_weights(q, kv_heads * group * head_dim, upper, group, head_dim, members, width)
    weights = weights.to(digests.dtype.element_ty)
    side = tl.arange(0, width)
    # Places are looked up a tile ahead, as pages are in decode_attention.py.
    for start in range(first, stop, tile):
        block = start + t
        ranked = place >= 0
        source = (place.to(tl.int64) * kv_heads + head) * (2 * head_dim)
        place = tl.load(table + tile + block, mask=tile + block < stop, other=-1)
        known = ranked[:, None] & (side < 2 * head_dim)[None, :]
        digest = tl.load(digests + source[:, None] + side[None, :], mask=known, other=0.0)
        of_heads = tl.dot(digest, weights, input_precision="ieee")
        score = _over_group(tl.reshape(of_heads, [tile, 2, members]), group, members, worst, best_head)
        score = tl.where(score == score, tl.minimum(tl.maximum(score, worst), -worst), worst)
        score = tl.where(ranked[:, None], score, -float("inf"))
        tl.store(out + block[:, None], score, mask=(block < stop)[:, None])


def choose_splits(num_pairs: int, num_blocks: int, tile: int) -> int:
    """How many programs share the blocks of each of num_pairs (entry, KV head) pairs, by shapes alone, since a CUDA
    graph keeps the grid."""
    return max(1, min(-(-PROGRAMS // max(num_pairs, 1)), -(-num_blocks // tile)))


def score_blocks_triton(
    queries: torch.Tensor,
    digests: torch.Tensor,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    end: torch.Tensor,
    *,
    splits: int | None = None,
) -> torch.Tensor:
    entries, rows, heads, head_dim = queries.shape
    kv_heads, num_blocks = digests.shape[1], digest_table.shape[1]
    group = heads // kv_heads
    tile = TILE if queries.itemsize == 2 else 16  # float32 is for tests: both factors are in registers
    if splits is None:
        splits = choose_splits(entries * kv_heads, num_blocks, tile)
    scores = queries.new_empty(entries, rows, kv_heads, num_blocks, dtype=torch.float32)
    members, width = max(triton.next_power_of_2(group), 8), max(triton.next_power_of_2(2 * head_dim), 16)
    _score_blocks_kernel[(splits * kv_heads, entries)](
        queries, digests, digest_table, lanes, end, scores, num_blocks, digest_table.stride(0),
        LEAST, UPPER, BEST_HEAD, kv_heads, group, head_dim, members, width, tile,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return scores


def wanted_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of each row: [..., blocks] bool, exactly `count` of them true, or all ranked if there are fewer.

    scores: [..., blocks] float32, as from `score_blocks`. Of equal scores the lower block comes first. Slots are K, and
    one of them is block 0's: the count of a working set is K - 1.
    """
    assert (scores.dtype, count >= 0) == (torch.float32, True), (scores.dtype, count)
    assert scores.is_contiguous()
    return wanted_blocks_triton(scores, count) if scores.is_cuda else wanted_blocks_reference(scores, count)


def wanted_blocks_reference(scores: torch.Tensor, count: int) -> torch.Tensor:
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = top_scores(scores, count)
    above, level = scores > threshold, (scores == threshold) & (scores > -torch.inf)
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))


def top_scores(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The count-th best score of each row, [..., 1]: -inf if there are fewer; count > 0."""
    count = min(count, scores.shape[-1])
    return scores.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)


@triton.jit(do_not_specialize=["count"])
def _wanted_blocks_kernel(scores, wanted, num_blocks, count, width: tl.constexpr):
    """One program for one row, all of it at once."""
    block = tl.arange(0, width)
    inside = block < num_blocks
    row = tl.program_id(0).to(tl.int64) * num_blocks
    score = tl.load(scores + row + block, mask=inside, other=-float("inf"))
    best = keep_best(order_of_floats(score), score > -float("inf"), count)
    tl.store(wanted + row + block, best.to(tl.uint8), mask=inside)


def wanted_blocks_triton(scores: torch.Tensor, count: int) -> torch.Tensor:
    num_blocks = scores.shape[-1]
    wanted = torch.empty_like(scores, dtype=torch.bool)
    rows = math.prod(scores.shape[:-1])
    _wanted_blocks_kernel[(rows,)](scores, wanted.view(torch.uint8), num_blocks, count, **row_shape(num_blocks))
    return wanted
