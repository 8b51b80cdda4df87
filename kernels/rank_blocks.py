"""Which blocks a KV head wants, from what its query heads expect to find in them, and what of that is lacking.

With p_h(j) the logit that head h of a group expects in block j (score_keys.py), sums over ranked j, which are those on
a shortlist:

    norm_h   = log sum_j exp p_h(j)
    score(j) = log sum_h exp(p_h(j) - norm_h / 2), and HELD_AHEAD more if one of the KV head's slots holds j
    wanted   = the `count` best of each row, of equal scores the lower block first
    share(j) = exp(p_h(j) - norm_h), of the head's attention to these, that it may expect in block j
    lacking  = mean over h of the sum of share(j)^2 over the missing j: those that the normal row wants, that are in no
               slot, and before the ring
    worth    = what the normal row wants, but for the missing whose mean share over h is LEAST_SHARE or less: so a step
               that runs again fetches few blocks for nearly all that it lacked

Squares tell one block of which much is expected from many of which little is: text goes on well without the latter.
Half of the norm is between the sum of these shares, to which a head counts little whose attention is spread, and the
greatest logit, which has no regard for what else a head finds: as good for a needle as the latter, for the rest as the
former. What a held block is ahead saves fetches that gain next to nothing. tools/NOTES.md, "What the ranking misses",
has the numbers.
"""

from typing import NamedTuple

import torch

from minserve.kernels.keep_best import keep_best, keep_best_reference, order_of_floats, row_shape
from minserve.kernels.lang import BITS, fast_log2, tl, triton
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL

HELD_AHEAD = 0.5
"""Nats."""

LEAST_SHARE = 0.002
"""Of the attention: with five times as much fewer needles are found; with none half as many bytes more are fetched."""

NUMBERS_PER_WARP = 2048
"""Logits, as many for each block as a group has heads. From 32,768 of a row on, which 16 warps have, some registers are
spilled: that is 8,192 blocks of groups of 4, or 4,096 of groups of 8."""


class Ranking(NamedTuple):
    """scores: [entries, kv_heads, blocks] float32, of the lookahead row, -inf where not ranked
    wanted: [entries, 2 (lookahead, normal), kv_heads, blocks] bool, `count` of a row, or all ranked if they are fewer
    lacking: [entries, kv_heads] float32, of the normal row; 0 for padding
    worth: [entries, kv_heads, blocks] bool, of the normal row
    """

    scores: torch.Tensor
    wanted: torch.Tensor
    lacking: torch.Tensor
    worth: torch.Tensor


def rank_blocks(
    logits: torch.Tensor, block_slot: torch.Tensor, lanes: torch.Tensor, ring_start: torch.Tensor, count: int
) -> Ranking:
    """logits: [entries, 2, kv_heads, blocks, group] float16 or float32, as `score_blocks` returns them: on a CPU of one
        row, too, which stands for both
    block_slot: [num_lanes, kv_heads, max_blocks] int32, as in `SlotMaps`; blocks <= max_blocks
    lanes: [entries] int64, -1: padding, of whose logits all are -inf
    ring_start: [entries] int64, the first block in the ring of this step's rows
    count: of a working set it is K - 1, as one of its slots is block 0's
    """
    entries, rows, kv_heads, num_blocks, _ = logits.shape
    max_blocks = block_slot.shape[2]
    assert kv_heads == block_slot.shape[1], (logits.shape, block_slot.shape)
    assert rows == 2 or (rows == 1 and not logits.is_cuda), logits.shape
    assert logits.dtype in (torch.float16, torch.float32), logits.dtype
    assert (num_blocks <= max_blocks, block_slot.dtype) == (True, torch.int32), (num_blocks, block_slot)
    for numbers in (lanes, ring_start):
        assert (numbers.shape, numbers.dtype) == ((entries,), torch.int64), (numbers.shape, numbers.dtype, entries)
    assert count >= 0, count
    assert all(tensor.is_contiguous() for tensor in (block_slot, lanes, ring_start))
    run = rank_blocks_triton if logits.is_cuda else rank_blocks_reference
    return run(logits, block_slot, lanes, ring_start, count)


def rank_blocks_reference(
    logits: torch.Tensor, block_slot: torch.Tensor, lanes: torch.Tensor, ring_start: torch.Tensor, count: int
) -> Ranking:
    num_blocks, logits = logits.shape[3], logits.to(torch.float32)
    norms = logits.logsumexp(dim=3, keepdim=True).nan_to_num_(neginf=0.0)
    held = block_slot[lanes.clamp_min(0), :, :num_blocks] >= 0
    scores = (logits - 0.5 * norms).logsumexp(dim=4) + HELD_AHEAD * held[:, None]
    wanted = keep_best_reference(scores, count)
    behind_ring = torch.arange(num_blocks, device=lanes.device) < ring_start[:, None]
    missing = wanted[:, -1] & ~held & behind_ring[:, None]
    shares = (logits[:, -1] - norms[:, -1]).exp_().mul_(missing[..., None])
    worth = wanted[:, -1] & (~missing | (shares.mean(dim=3) > LEAST_SHARE))
    lacking = shares.square_().sum(dim=2).mean(dim=2)
    wanted = wanted.expand(-1, 2, -1, -1).contiguous()
    return Ranking(scores[:, LOOKAHEAD].contiguous(), wanted, lacking, worth)


@triton.jit(do_not_specialize=["num_blocks", "max_blocks", "count"])
def _rank_blocks_kernel(
    logits, block_slot, lanes, ring_start, scores, wanted, lacking, worth, num_blocks, max_blocks, count,
    ahead: tl.constexpr, least_share: tl.constexpr, normal: tl.constexpr, bits: tl.constexpr, kv_heads: tl.constexpr,
    group: tl.constexpr, members: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program for one row of one KV head of an entry, all of whose logits are in registers, those of a block in one
    thread. members, width: group and num_blocks, rounded up to powers of two."""
    number = tl.program_id(0).to(tl.int64)
    head = number % kv_heads
    entry = number // (2 * kv_heads)
    is_normal = number // kv_heads % 2 == normal
    lane = tl.maximum(tl.load(lanes + entry), 0)
    block = tl.arange(0, width)
    inside = block < num_blocks
    member = tl.arange(0, members)[None, :]
    least: tl.constexpr = -1e30  # in place of -inf, of which there is no difference

    is_known = inside[:, None] & (member < group)
    source = logits + number * num_blocks * members + block[:, None] * members + member
    logit = tl.load(source, mask=is_known, other=-float("inf")).to(tl.float32) * bits
    most = tl.maximum(tl.max(logit, 0), least)
    norm = most + fast_log2(tl.maximum(tl.sum(tl.exp2(logit - most[None, :]), 0), 1.0))
    part = logit - 0.5 * norm[None, :]
    top = tl.max(part, 1)
    ranked = top > least
    total = tl.sum(tl.exp2(part - tl.maximum(top, least)[:, None]), 1)
    slot = tl.load(block_slot + (lane * kv_heads + head) * max_blocks + block, mask=inside, other=-1)
    score = (top + fast_log2(tl.maximum(total, 1.0))) * (1 / bits) + tl.where(slot >= 0, ahead, 0.0)
    best = keep_best(order_of_floats(score), ranked, count)
    tl.store(wanted + number * num_blocks + block, best.to(tl.uint8), mask=inside)
    if is_normal:
        missing = best & (slot < 0) & (block < tl.load(ring_start + entry))
        # Loaded again: in registers, logits would keep other programs from beginning.
        logit = tl.load(source, mask=missing[:, None] & (member < group), other=-float("inf")).to(tl.float32) * bits
        share = tl.exp2(logit - norm[None, :])
        tl.store(lacking + entry * kv_heads + head, tl.sum(tl.sum(share * share, 1), 0) / group)
        share = tl.sum(share, 1) / group
        is_worth = best & ((share > least_share) | ~missing)
        tl.store(worth + (entry * kv_heads + head) * num_blocks + block, is_worth.to(tl.uint8), mask=inside)
    else:
        tl.store(scores + (entry * kv_heads + head) * num_blocks + block, score, mask=inside)


def rank_blocks_triton(
    logits: torch.Tensor, block_slot: torch.Tensor, lanes: torch.Tensor, ring_start: torch.Tensor, count: int
) -> Ranking:
    entries, rows, kv_heads, num_blocks, group = logits.shape
    max_blocks, members = block_slot.shape[2], triton.next_power_of_2(group)
    strides = (rows * kv_heads * num_blocks, kv_heads * num_blocks, num_blocks, 1)
    assert logits.stride() == (*(members * stride for stride in strides), 1), (logits.shape, logits.stride())
    wanted = logits.new_empty(entries, rows, kv_heads, num_blocks, dtype=torch.bool)
    scores = torch.empty_like(wanted[:, LOOKAHEAD], dtype=torch.float32, memory_format=torch.contiguous_format)
    worth = torch.empty_like(scores, dtype=torch.bool)
    lacking = logits.new_empty(entries, kv_heads, dtype=torch.float32)
    _rank_blocks_kernel[(entries * rows * kv_heads,)](
        logits, block_slot, lanes, ring_start, scores, wanted.view(torch.uint8), lacking, worth.view(torch.uint8),
        num_blocks, max_blocks, count, HELD_AHEAD, LEAST_SHARE, NORMAL, BITS, kv_heads, group, members,
        **row_shape(num_blocks, NUMBERS_PER_WARP // max(members, 4)),
    )  # fmt: skip
    return Ranking(scores, wanted, lacking, worth)
