"""The queries of a layer by which blocks are ranked: the lookahead row's of each lane, and the normal row's.

kept[lanes[e]] = q[e, ahead[e]], q[e, 0]

On a GPU `norm_rope_store` does it, which has them in registers.
"""

from typing import NamedTuple

import torch


class Keep(NamedTuple):
    """ahead: [entries] int64, below rows; lanes: [entries] int64, no lane twice, -1: padding, of which nothing is kept;
    kept: [num_lanes, 2, heads, head_dim], of q's dtype, written."""

    ahead: torch.Tensor
    lanes: torch.Tensor
    kept: torch.Tensor

    def check(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Of q: [tokens, heads, head_dim]."""
        ahead, lanes, kept = self
        assert tokens % len(lanes) == 0, (tokens, lanes.shape)
        assert (kept.shape[1:], kept.dtype) == ((2, heads, head_dim), dtype), (kept.shape, kept.dtype, heads, head_dim)
        assert ahead.shape == (len(lanes),), (ahead.shape, lanes.shape)
        assert ahead.dtype == lanes.dtype == torch.int64, (ahead.dtype, lanes.dtype)
        assert all(tensor.is_contiguous() for tensor in self)


def keep_queries(q: torch.Tensor, keep: Keep) -> None:
    """In torch. q: [entries * rows, heads, head_dim], an entry's rows one after the other."""
    ahead, lanes, kept = keep
    rows = q.view(len(lanes), -1, *q.shape[1:])
    both = torch.stack((rows[torch.arange(len(rows), device=q.device), ahead], rows[:, 0]), dim=1)
    real = lanes >= 0
    kept[lanes[real]] = both[real]
