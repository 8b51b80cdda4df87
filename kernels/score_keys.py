"""The attention logit that a query head may expect to find in each block of a shortlist, from the levels of its keys.

    logit(key)   = sum over slow d of q_d (min_d + (max_d - min_d) level_d / 3) / sqrt(head_dim)
    logit(block) = log sum over its 16 keys of exp logit(key)

with min, max, levels and the slow coordinates as in build_digests.py.
"""

import torch

from minserve.kernels.build_digests import LEVELS, Digests, slow_coordinates, unpack_levels
from minserve.kernels.score_blocks import MOST, score_blocks
from minserve.kernels.shortlist_blocks import shortlist_blocks


def expect_in_blocks(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    end: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """As `score_blocks` returns it; -inf where a block is not ranked, or is not among the `count` worth a second look."""
    logits = score_blocks(queries, digests.extremes, digest_table, lanes, end)
    shortlist = shortlist_blocks(logits, min(count, logits.shape[3]))
    score_keys(queries, digests, digest_table, lanes, shortlist, logits)
    return logits


def score_keys(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    shortlist: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    score_keys_reference(queries, digests, digest_table, lanes, shortlist, logits)


def score_keys_reference(
    queries: torch.Tensor,
    digests: Digests,
    digest_table: torch.Tensor,
    lanes: torch.Tensor,
    shortlist: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    entries, rows, _, head_dim = queries.shape
    kv_heads, count = shortlist.shape[1:]
    valid = shortlist >= 0
    blocks = torch.where(valid, shortlist, 0).to(torch.int64)
    places = digest_table[lanes.clamp_min(0)].gather(1, blocks.flatten(1)).view_as(blocks)
    source = torch.where(valid, places, 0).to(torch.int64) * kv_heads
    source = (source + torch.arange(kv_heads, device=lanes.device)[:, None]).flatten()
    least, most = digests.extremes.flatten(0, 1).index_select(0, source).to(torch.float32).unsqueeze(2).unbind(1)
    levels = unpack_levels(digests.keys.flatten(0, 1).index_select(0, source), head_dim // 2)
    keys = torch.addcmul(least, (most - least) / (LEVELS - 1), levels.to(torch.float32))
    grouped = slow_coordinates(queries.to(torch.float32)).view(entries, rows, kv_heads, -1, head_dim // 2)
    grouped = grouped.transpose(1, 2).flatten(2, 3)
    found = grouped @ keys.view(entries, kv_heads, -1, head_dim // 2).transpose(2, 3)
    found = found.mul_(head_dim**-0.5).nan_to_num_(nan=-MOST).clamp_(-MOST, MOST)
    found = found.view(*found.shape[:3], count, -1).logsumexp(dim=4)  # [entries, kv_heads, rows * group, count]
    found = found.view(entries, kv_heads, rows, -1, count).permute(0, 2, 1, 4, 3).to(logits.dtype)
    at = blocks[:, None, :, :, None].expand_as(found)
    found = torch.where(valid[:, None, :, :, None], found, logits.gather(3, at))
    logits.scatter_(3, at, found)
