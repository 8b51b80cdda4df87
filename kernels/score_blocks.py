"""How much a query may find in each block, from the blocks' digests; and which blocks are wanted therefore.

    score(block) = sum over the query heads q of a KV head's group, over d, of max(q_d kmin_d, q_d kmax_d)

which is no less than the group's sum of q . k for any key k of the block (Quest, arXiv 2406.10774). For one head it is
max(q, 0) . kmax + min(q, 0) . kmin, linear in the digest, so the group's is one product of vectors twice as long:

    score(block) = [sum of min(q, 0), sum of max(q, 0)] . [kmin, kmax]

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

TILE, NUM_WARPS = 32, 4
"""Blocks that a program scores at once, and its warps."""


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
    pair = torch.cat((grouped.clamp_max(0).sum(dim=3), grouped.clamp_min(0).sum(dim=3)), dim=-1)
    # What a table holds where nothing is ranked may be no place. Head by head, as that is how products read them.
    places = torch.where(ranked, places, 0).to(torch.int64)[:, None, :]
    source = places * kv_heads + torch.arange(kv_heads, device=lanes.device)[:, None]
    found = digests.view(-1, 2 * head_dim).index_select(0, source.flatten()).to(torch.float32)
    scores = pair.transpose(1, 2) @ found.view(entries, kv_heads, num_blocks, -1).transpose(2, 3)
    scores = scores.nan_to_num_(nan=LEAST, neginf=LEAST).masked_fill_(~ranked[:, None, None, :], -torch.inf)
    return scores.transpose(1, 2).contiguous()


@triton.jit
def _load_pair(q, kv_head, column, in_head, group: tl.constexpr, head_dim: tl.constexpr, group_width: tl.constexpr):
    """(sum of min(q, 0), sum of max(q, 0)) over a KV head's group, [width] float32 each. q: an entry's row."""
    member = tl.arange(0, group_width)
    offset = (kv_head * group + member)[:, None] * head_dim + column[None, :]
    x = tl.load(q + offset, mask=(member < group)[:, None] & in_head[None, :], other=0.0).to(tl.float32)
    return tl.sum(tl.minimum(x, 0.0), 0), tl.sum(tl.maximum(x, 0.0), 0)


@triton.jit
def _store_scores(out, least, most, low, high, ranked, inside, worst):
    """Scores by one row's pair of the digests (least, most), [blocks, width] each."""
    score = tl.sum(least.to(tl.float32) * low[None, :] + most.to(tl.float32) * high[None, :], 1)
    score = tl.where(score == score, tl.minimum(tl.maximum(score, worst), -worst), worst)
    tl.store(out, tl.where(ranked, score, -float("inf")), mask=inside)


@triton.jit(do_not_specialize=["num_blocks", "table_stride"])
def _score_blocks_kernel(
    queries,
    digests,
    digest_table,
    lanes,
    end,
    scores,
    num_blocks,
    table_stride,
    worst: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    group_width: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """One program for both rows of one KV head of an entry, and one tile of blocks. Heads come first, since their
    digests lie side by side; group_width, width: group and head_dim, rounded up to powers of two."""
    head = tl.program_id(0) % kv_heads
    first = tl.program_id(0) // kv_heads * tile
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + entry)
    last = tl.minimum(tl.where(lane >= 0, tl.load(end + entry), 0), num_blocks)
    block = first + tl.arange(0, tile)
    inside = block < num_blocks
    ahead = scores + (entry * 2 * kv_heads + head) * num_blocks + block
    normal = ahead + kv_heads * num_blocks
    if first < last:
        place = tl.load(digest_table + lane * table_stride + block, mask=(block >= 1) & (block < last), other=-1)
        ranked = place >= 0
        column = tl.arange(0, width)
        in_head = column < head_dim
        known = ranked[:, None] & in_head[None, :]
        source = digests + (place.to(tl.int64) * kv_heads + head)[:, None] * (2 * head_dim) + column[None, :]
        least = tl.load(source, mask=known, other=0.0)
        most = tl.load(source + head_dim, mask=known, other=0.0)
        # While these are on their way, and so before anything is stored:
        q = queries + entry * (2 * kv_heads * group * head_dim)
        low, high = _load_pair(q, head, column, in_head, group, head_dim, group_width)
        q += kv_heads * group * head_dim
        normal_low, normal_high = _load_pair(q, head, column, in_head, group, head_dim, group_width)
        _store_scores(ahead, least, most, low, high, ranked, inside, worst)
        _store_scores(normal, least, most, normal_low, normal_high, ranked, inside, worst)
    else:
        nothing = tl.full([tile], -float("inf"), tl.float32)
        tl.store(ahead, nothing, mask=inside)
        tl.store(normal, nothing, mask=inside)


def score_blocks_triton(
    queries: torch.Tensor, digests: torch.Tensor, digest_table: torch.Tensor, lanes: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    entries, rows, heads, head_dim = queries.shape
    kv_heads, num_blocks = digests.shape[1], digest_table.shape[1]
    group = heads // kv_heads
    scores = queries.new_empty(entries, rows, kv_heads, num_blocks, dtype=torch.float32)
    _score_blocks_kernel[(triton.cdiv(num_blocks, TILE) * kv_heads, entries)](
        queries,
        digests,
        digest_table,
        lanes,
        end,
        scores,
        num_blocks,
        digest_table.stride(0),
        LEAST,
        kv_heads,
        group,
        head_dim,
        triton.next_power_of_2(group),
        triton.next_power_of_2(head_dim),
        TILE,
        num_warps=NUM_WARPS,
    )
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
