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

import torch

LOOKAHEAD, NORMAL = 0, 1
"""The rows."""

LEAST = torch.finfo(torch.float32).min
"""The score of a block whose sum is no number, or overflows: the worst, but ranked."""


def score_blocks(
    queries: torch.Tensor, digests: torch.Tensor, digest_table: torch.Tensor, lanes: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Returns [entries, 2 (lookahead, normal), kv_heads, blocks] float32.

    queries: [entries, 2, heads, head_dim], after RoPE
    digests: [places, kv_heads, 2 (min, max), head_dim], one layer's, of the same dtype
    digest_table: [num_lanes, blocks] int32, the place of each block's digest, -1: none; anything behind a lane's end.
        It may be the first columns of a wider table: as many as `end` needs.
    lanes: [entries] int64, -1: padding, for which nothing is ranked
    end: [entries] int64, one behind the last block that is ranked: the first of the ring.
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
    return score_blocks_reference(queries, digests, digest_table, lanes, end)


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


def wanted_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of each row: [..., blocks] bool, exactly `count` of them true, or all ranked if there are fewer.

    scores: [..., blocks] float32, as from `score_blocks`. Of equal scores the lower block comes first. Slots are K, and
    one of them is block 0's: the count of a working set is K - 1.
    """
    assert (scores.dtype, count >= 0) == (torch.float32, True), (scores.dtype, count)
    return wanted_blocks_reference(scores, count)


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
