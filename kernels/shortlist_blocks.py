"""Which blocks of a KV head are worth a second look: the `count` best by the extremes of their keys, of both rows.

With p(j) the logit that a query head of a row expects in block j by extremes (score_blocks.py):

    norm        = log sum over ranked j of exp p(j)
    worth(j)    = the greatest p(j) - norm / 2 of the KV head's query heads, in both rows
    listed      = the `count` best, of equal ones the lower block first

Halves of norms are as in rank_blocks.py, which says more of them. What is not on the list is ranked no more.
"""

import torch

from minserve.kernels.keep_best import keep_best, keep_best_reference, order_of_floats, row_shape
from minserve.kernels.lang import BITS, fast_log2, tl, triton
from minserve.kernels.rank_blocks import NUMBERS_PER_WARP

FEWEST = 256
"""Blocks of a list, or twice the slots if these are more. All blocks of 4K tokens, of which half lose needles
(tools/NOTES.md, "What the ranking misses")."""


def shortlist_length(num_slots: int) -> int:
    return max(FEWEST, 2 * num_slots)


def shortlist_blocks(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns [entries, kv_heads, count] int32: blocks, ascending, and behind them -1. All other logits become -inf.

    logits: [entries, 2, kv_heads, blocks, group] float16 or float32, as `score_blocks` returns them
    """
    _, rows, _, num_blocks, _ = logits.shape
    assert rows == 2 or (rows == 1 and not logits.is_cuda), logits.shape
    assert 0 < count <= num_blocks, (logits.shape, count)
    assert logits.dtype in (torch.float16, torch.float32), logits.dtype
    run = shortlist_blocks_triton if logits.is_cuda else shortlist_blocks_reference
    return run(logits, count)


def shortlist_blocks_reference(logits: torch.Tensor, count: int) -> torch.Tensor:
    num_blocks = logits.shape[3]
    wide = logits.to(torch.float32)
    norms = wide.logsumexp(dim=3, keepdim=True).nan_to_num_(neginf=0.0)
    listed = keep_best_reference((wide - 0.5 * norms).amax(dim=(1, 4)), count)
    logits.masked_fill_(~listed[:, None, :, :, None], -torch.inf)
    number = torch.arange(num_blocks, dtype=torch.int32, device=logits.device)
    blocks = torch.where(listed, number, num_blocks).topk(count, dim=2, largest=False).values
    return torch.where(blocks < num_blocks, blocks, -1)


@triton.jit(do_not_specialize=["num_blocks", "count"])
def _shortlist_blocks_kernel(
    logits, shortlist, num_blocks, count, bits: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    members: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program for a KV head of an entry. members, width: group and num_blocks, rounded up to powers of two."""
    pair = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, width)
    inside = block < num_blocks
    member = tl.arange(0, members)[None, :]
    is_known = inside[:, None] & (member < group)
    row_stride = kv_heads * num_blocks.to(tl.int64) * members
    source = logits + pair // kv_heads * 2 * row_stride + pair % kv_heads * num_blocks * members
    source += block[:, None] * members + member
    least: tl.constexpr = -1e30  # in place of -inf, of which there is no difference

    worth = tl.full([width], least, tl.float32)
    for row in range(2):  # not unrolled: in registers, the logits of both would keep other programs from beginning
        logit = tl.load(source + row * row_stride, mask=is_known, other=-float("inf")).to(tl.float32) * bits
        most = tl.maximum(tl.max(logit, 0), least)
        norm = most + fast_log2(tl.maximum(tl.sum(tl.exp2(logit - most[None, :]), 0), 1.0))
        worth = tl.maximum(worth, tl.max(logit - 0.5 * norm[None, :], 1))
    ranked = worth > least
    kept = keep_best(order_of_floats(worth), ranked, count)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    target = shortlist + pair * count
    tl.store(target + place, block, mask=kept)
    tl.store(
        target + block, tl.full([width], -1, tl.int32), mask=(block < count) & (block >= tl.sum(kept.to(tl.int32), 0))
    )
    dropped = (ranked & ~kept)[:, None] & is_known
    for row in tl.static_range(2):
        tl.store(source + row * row_stride, -float("inf"), mask=dropped)


def shortlist_blocks_triton(logits: torch.Tensor, count: int) -> torch.Tensor:
    entries, rows, kv_heads, num_blocks, group = logits.shape
    members = triton.next_power_of_2(group)
    strides = (rows * kv_heads * num_blocks, kv_heads * num_blocks, num_blocks, 1)
    assert logits.stride() == (*(members * stride for stride in strides), 1), (logits.shape, logits.stride())
    shortlist = torch.empty(entries, kv_heads, count, dtype=torch.int32, device=logits.device)
    _shortlist_blocks_kernel[(entries * kv_heads,)](
        logits, shortlist, num_blocks, count, BITS, kv_heads, group, members,
        **row_shape(num_blocks, NUMBERS_PER_WARP // max(members, 4)),
    )  # fmt: skip
    return shortlist
