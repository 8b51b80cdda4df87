"""Which blocks of a KV head are worth a second look: the `count` best by the extremes of their keys, of both rows.

With p(j) the logit that a query head of a row expects in block j by extremes (score_blocks.py):

    norm        = log sum over ranked j of exp p(j)
    worth(j)    = the greatest p(j) - norm / 2 of the KV head's query heads and rows
    shortlisted = the `count` best, of equal ones the lower block first

Halves of norms are as in rank_blocks.py, which says more of them. What is not on the list is ranked no more.
"""

import torch

from minserve.kernels.keep_best import keep_best_reference


def shortlist_length(num_slots: int) -> int:
    """Blocks of a list. Of 256 blocks a quarter that is left unseen has been what was asked for (tools/NOTES.md)."""
    return max(256, 2 * num_slots)


def shortlist_blocks(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns [entries, kv_heads, count] int32, ascending, behind them -1; all other logits become -inf.

    logits: [entries, 2, kv_heads, blocks, group] float16 or float32, as `score_blocks` returns them
    """
    assert count <= logits.shape[3], (count, logits.shape)
    return shortlist_blocks_reference(logits, count)


def shortlist_blocks_reference(logits: torch.Tensor, count: int) -> torch.Tensor:
    num_blocks = logits.shape[3]
    wide = logits.to(torch.float32)
    norms = wide.logsumexp(dim=3, keepdim=True).nan_to_num_(neginf=0.0)
    listed = keep_best_reference((wide - 0.5 * norms).amax(dim=(1, 4)), count)
    logits.masked_fill_(~listed[:, None, :, :, None], -torch.inf)
    number = torch.arange(num_blocks, dtype=torch.int32, device=logits.device)
    blocks = torch.where(listed, number, num_blocks).topk(count, dim=2, largest=False).values
    return torch.where(blocks < num_blocks, blocks, -1)
