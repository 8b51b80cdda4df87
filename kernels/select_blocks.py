"""What to fetch for each KV head of a layer, and into which slots: the working set's one decision, without the host.

Of a (lane, KV head), with `wanted` the blocks that the lookahead row's ranking wants:

    hits       = wanted, and in a slot
    misses     = wanted, and neither in a slot nor in the ring
    evictable  = slots that may be taken, in the order of slots.py
    candidates = the best misses by score, then by lower block: at most C, and at most as many as there are evictable
    admitted   = of all candidates of the lane in this layer the best by score, then by head, then by block: as many as
                 its allowance

The admitted of a head, in the order of blocks, go into as many of its evictable slots, the first of these, in the order
of their numbers. A head's share of the allowance follows from scores alone, in whatever order it is computed. What is
not admitted is cut, and competes again in the next step. A block that leaves this step's ring is no miss here:
`retire_block` takes care of it, after the fetches.

On the device all three choices are "the n best of a row" (keep_best.py), of misses, of an entry's candidates, and of
slots. One kernel finds each head's candidates; in a second, each head finds the allowance's share out of all of them.
"""

from typing import NamedTuple

import torch

from minserve.kernels.keep_best import keep_best, order_of_floats, row_shape
from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import write_where
from minserve.kernels.slots import SlotMaps, are_wanted, evictable_slots, eviction_order

__all__ = ["FetchPlan", "SlotMaps", "select_blocks"]

NUMBERS_PER_WARP = 256


class FetchPlan(NamedTuple):
    """blocks, slots: [entries, kv_heads, C] int32, a head's fetches by block, and -1 behind them.

    counters: [entries, kv_heads, 5] int32:
        hits, misses; cut: misses that are not fetched
        surprises, asked: blocks that the normal row wants outside the ring, those in no slot, and all of them
    Zero for who does not take part.
    """

    blocks: torch.Tensor
    slots: torch.Tensor
    counters: torch.Tensor


def select_blocks(
    wanted: torch.Tensor,
    scores: torch.Tensor,
    normal_wanted: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    sparse: torch.Tensor,
    ring_start: torch.Tensor,
    allowance: torch.Tensor,
    step: torch.Tensor,
    cap: int,
    caps: torch.Tensor | None = None,
) -> FetchPlan:
    """Plans, and notes the step in maps.slot_used for slots whose block is wanted. The other maps stay as they are.

    wanted, scores, normal_wanted: [entries, kv_heads, blocks], from `rank_blocks`, of the lookahead row, its scores
        (float32), and of the normal row; blocks <= max_blocks, and any that a slot holds is among them. Rows of one
        tensor: an entry's heads are contiguous
    lanes: [entries] int64, no lane twice, -1: padding; sparse: [num_lanes] bool, others than sparse lanes do nothing
    ring_start: [entries] int64, the first block in the ring of this step's rows
    allowance: [num_lanes] int32, how many blocks the lane may fetch in this layer, over all heads; not negative. It is
        only read: whoever keeps it takes off misses - cut
    step: [1] int32, on the device, since a graph keeps what it was captured with; rises
    cap: C, the most blocks that one head may fetch; caps: [entries] int64, the same of each entry, where these differ
    """
    entries, kv_heads, num_blocks = wanted.shape
    maps.check(kv_heads)
    num_lanes, _, max_blocks = maps.block_slot.shape
    assert wanted.shape == scores.shape == normal_wanted.shape, (wanted.shape, scores.shape, normal_wanted.shape)
    dtypes = (wanted.dtype, normal_wanted.dtype, scores.dtype)
    assert dtypes == (torch.bool, torch.bool, torch.float32), dtypes
    assert num_blocks <= max_blocks, (num_blocks, max_blocks)
    assert all(each[:1].is_contiguous() for each in (wanted, scores, normal_wanted))
    for numbers in (lanes, ring_start):
        assert (numbers.shape, numbers.dtype) == ((entries,), torch.int64), (numbers.shape, numbers.dtype, entries)
    assert (sparse.shape, sparse.dtype) == ((num_lanes,), torch.bool), (sparse.shape, sparse.dtype)
    assert (allowance.shape, allowance.dtype) == ((num_lanes,), torch.int32), (allowance.shape, allowance.dtype)
    assert (step.shape, step.dtype, cap >= 0) == ((1,), torch.int32, True), (step.shape, step.dtype, cap)
    assert caps is None or (caps.shape, caps.dtype) == (lanes.shape, torch.int64), (caps, lanes.shape)
    run = select_blocks_triton if wanted.is_cuda else select_blocks_reference
    return run(wanted, scores, normal_wanted, maps, lanes, sparse, ring_start, allowance, step, cap, caps)


def select_blocks_reference(
    wanted: torch.Tensor,
    scores: torch.Tensor,
    normal_wanted: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    sparse: torch.Tensor,
    ring_start: torch.Tensor,
    allowance: torch.Tensor,
    step: torch.Tensor,
    cap: int,
    caps: torch.Tensor | None = None,
) -> FetchPlan:
    lane = lanes.clamp_min(0)
    takes_part = (lanes >= 0) & sparse[lane]
    num_blocks = wanted.shape[-1]
    in_slot = maps.block_slot[lane][..., :num_blocks] >= 0
    behind_ring = torch.arange(num_blocks, device=lanes.device) < ring_start[:, None]
    may_miss = ~in_slot & (behind_ring & takes_part[:, None])[:, None, :]
    misses = wanted & may_miss
    hits = wanted & in_slot & takes_part[:, None, None]

    slot_block, slot_used = maps.slot_block[lane], maps.slot_used[lane]
    slots, num_evictable = evictable_slots(slot_block, slot_used, wanted)
    best, blocks = _best(torch.where(misses, scores, -torch.inf), cap)
    place = torch.arange(cap, device=lanes.device)
    is_candidate = (best > -torch.inf) & (place < num_evictable[..., None])
    if caps is not None:
        is_candidate &= (place < caps[:, None])[:, None, :]
    admitted = _within_allowance(torch.where(is_candidate, best, -torch.inf), allowance[lane])

    used = torch.where(are_wanted(slot_block, wanted), step, slot_used)
    write_where(maps.slot_used, lanes, used, takes_part)
    asked = normal_wanted & (behind_ring & takes_part[:, None])[:, None, :]
    counted = (hits, misses, misses, asked & ~in_slot, asked)
    counters = torch.stack([each.sum(dim=-1) for each in counted], dim=-1)
    counters[..., 2] -= admitted.sum(dim=-1)
    blocks, slots = _sorted(blocks, admitted), _sorted(_first(slots, cap), admitted)
    return FetchPlan(blocks, slots, counters.to(torch.int32))


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The count best scores of each row and where they stand, equal ones in their order; padded by -inf and -1."""
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    missing = max(count - scores.shape[-1], 0)
    values = torch.nn.functional.pad(values[..., :count], (0, missing), value=-torch.inf)
    return values, _first(indices, count)


def _first(indices: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` of each row, padded by -1."""
    missing = max(count - indices.shape[-1], 0)
    return torch.nn.functional.pad(indices[..., :count], (0, missing), value=-1)


def _sorted(numbers: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The valid ones of each row in order, and -1 behind them, int32."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.where(valid, numbers, last).sort(dim=-1).values
    return torch.where(ordered < last, ordered, -1).to(torch.int32)


def _within_allowance(scores: torch.Tensor, allowance: torch.Tensor) -> torch.Tensor:
    """Which are among the best of their entry's: [entries, kv_heads, C] bool. -inf never is. allowance: [entries]."""
    flat = scores.flatten(1)
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order))
    return ((rank < allowance[:, None]) & (flat > -torch.inf)).view(scores.shape)


@triton.jit
def _store_numbers(out, numbers, chosen, count, cap, cap_width: tl.constexpr):
    """The chosen numbers one after the other, `count` of them, and -1 behind them, up to cap. Returns their places."""
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out + place, numbers, mask=chosen)
    rest = tl.arange(0, cap_width)
    tl.store(out + rest, -1, mask=(rest >= count) & (rest < cap))
    return place


@triton.jit(do_not_specialize=["wanted_stride", "scores_stride", "normal_stride", "num_blocks", "max_blocks", "cap"])
def _find_candidates_kernel(
    wanted, scores, normal_wanted, slot_block, slot_used, block_slot, lanes, sparse, ring_start, step, caps, candidates,
    candidate_scores, num_candidates, counters, wanted_stride, scores_stride, normal_stride, num_blocks, max_blocks,
    num_slots, cap, kv_heads: tl.constexpr, slot_width: tl.constexpr, cap_width: tl.constexpr, has_caps: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """One program for one KV head of an entry. Strides: from one entry to the next. Widths: the number of slots, cap,
    and num_blocks, rounded up to powers of two."""
    entry = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    row = entry * kv_heads + head
    lane = tl.load(lanes + entry)
    counters += row * 5
    if lane < 0:
        number = tl.arange(0, cap_width)
        tl.store(candidates + row * cap + number, -1, mask=number < cap)
        tl.store(num_candidates + row, 0)
        tl.store(counters + tl.arange(0, 8), 0, mask=tl.arange(0, 8) < 5)
        return
    takes_part = tl.load(sparse + lane) != 0
    # Nobody's slots and blocks are looked at for an entry that does not take part.
    end = tl.where(takes_part, tl.minimum(tl.load(ring_start + entry), num_blocks), 0)
    num_slots = tl.where(takes_part, num_slots, 0)
    lane_head = lane * kv_heads + head
    wanted += entry * wanted_stride + head * num_blocks

    slot = tl.arange(0, slot_width)
    slot_used += lane_head * num_slots
    _, may_go, keep = eviction_order(slot_block + lane_head * num_slots, slot_used, wanted, num_blocks, slot, num_slots)
    tl.store(slot_used + slot, tl.zeros_like(slot) + tl.load(step), mask=keep)

    block = tl.arange(0, width)
    inside = block < end
    is_wanted = tl.load(wanted + block, mask=inside, other=0) != 0
    absent = inside & (tl.load(block_slot + lane_head * max_blocks + block, mask=inside, other=0) < 0)
    normal_wanted += entry * normal_stride + head * num_blocks
    asked = inside & (tl.load(normal_wanted + block, mask=inside, other=0) != 0)
    missed = absent & is_wanted
    num_missed = tl.sum(missed.to(tl.int32), 0)
    tl.store(counters, tl.sum((is_wanted & ~absent).to(tl.int32), 0))
    tl.store(counters + 1, num_missed)
    tl.store(counters + 3, tl.sum((asked & absent).to(tl.int32), 0))
    tl.store(counters + 4, tl.sum(asked.to(tl.int32), 0))

    score = tl.load(scores + entry * scores_stride + head * num_blocks + block, mask=missed, other=0.0)
    limit = tl.minimum(tl.sum(may_go.to(tl.int32), 0), cap)
    if has_caps:
        limit = tl.minimum(limit, tl.load(caps + entry).to(tl.int32))
    best = keep_best(order_of_floats(score), missed, limit)
    num = tl.minimum(num_missed, limit)
    tl.store(num_candidates + row, num)
    place = _store_numbers(candidates + row * cap, block, best, num, cap, cap_width)
    tl.store(candidate_scores + row * cap + place, score, mask=best)


@triton.jit(do_not_specialize=["cap"])
def _admit_kernel(
    wanted, slot_block, slot_used, lanes, allowance, candidates, candidate_scores, num_candidates, blocks, slots,
    counters, wanted_stride, num_blocks, num_slots, cap,
    kv_heads: tl.constexpr, heads_width: tl.constexpr, slot_width: tl.constexpr, cap_width: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """One program for one KV head of an entry. heads_width: kv_heads, rounded up to a power of two; width: times
    cap_width. All candidates are looked at only where they are more than the allowance."""
    entry = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    row = entry * kv_heads + head
    num_admitted = tl.load(num_candidates + row)
    own = tl.arange(0, cap_width)
    if num_admitted == 0:  # padding has none either
        tl.store(blocks + row * cap + own, -1, mask=own < cap)
        tl.store(slots + row * cap + own, -1, mask=own < cap)
        tl.store(counters + row * 5 + 2, tl.load(counters + row * 5 + 1))
        return

    lane = tl.load(lanes + entry)
    allowed = tl.load(allowance + lane)
    each = tl.arange(0, heads_width)
    num_all = tl.sum(tl.load(num_candidates + entry * kv_heads + each, mask=each < kv_heads, other=0), 0)
    if num_all <= allowed:
        tl.store(blocks + row * cap + own, tl.load(candidates + row * cap + own, mask=own < cap), mask=own < cap)
    else:
        number = tl.arange(0, width)
        inside = (number // cap_width < kv_heads) & (number % cap_width < cap)
        source = entry * kv_heads * cap + number // cap_width * cap + number % cap_width
        block = tl.load(candidates + source, mask=inside, other=-1)
        score = tl.load(candidate_scores + source, mask=block >= 0, other=0.0)
        admitted = keep_best(order_of_floats(score), block >= 0, allowed) & (number // cap_width == head)
        num_admitted = tl.sum(admitted.to(tl.int32), 0)
        _store_numbers(blocks + row * cap, block, admitted, num_admitted, cap, cap_width)
    tl.store(counters + row * 5 + 2, tl.load(counters + row * 5 + 1) - num_admitted)

    slot = tl.arange(0, slot_width)
    first = (lane * kv_heads + head) * num_slots
    wanted += entry * wanted_stride + head * num_blocks
    order, may_go, _ = eviction_order(slot_block + first, slot_used + first, wanted, num_blocks, slot, num_slots)
    _store_numbers(slots + row * cap, slot, keep_best(order, may_go, num_admitted), num_admitted, cap, cap_width)


def select_blocks_triton(
    wanted: torch.Tensor,
    scores: torch.Tensor,
    normal_wanted: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    sparse: torch.Tensor,
    ring_start: torch.Tensor,
    allowance: torch.Tensor,
    step: torch.Tensor,
    cap: int,
    caps: torch.Tensor | None = None,
) -> FetchPlan:
    entries, kv_heads, num_blocks = wanted.shape
    num_slots = maps.slot_block.shape[2]
    blocks, slots, candidates = (lanes.new_empty(entries, kv_heads, cap, dtype=torch.int32) for _ in range(3))
    candidate_scores = scores.new_empty(entries, kv_heads, cap)
    counters = lanes.new_empty(entries, kv_heads, 5, dtype=torch.int32)
    num_candidates = lanes.new_empty(entries, kv_heads, dtype=torch.int32)
    slot_width, cap_width, heads_width = (triton.next_power_of_2(max(size, 1)) for size in (num_slots, cap, kv_heads))
    is_wanted = wanted.view(torch.uint8)
    _find_candidates_kernel[(entries * kv_heads,)](
        is_wanted, scores, normal_wanted.view(torch.uint8), *maps, lanes, sparse.view(torch.uint8), ring_start, step,
        ring_start if caps is None else caps, candidates, candidate_scores, num_candidates, counters, wanted.stride(0),
        scores.stride(0), normal_wanted.stride(0), num_blocks, maps.block_slot.shape[2], num_slots, cap, kv_heads,
        slot_width, cap_width, caps is not None, **row_shape(num_blocks, NUMBERS_PER_WARP),
    )  # fmt: skip
    _admit_kernel[(entries * kv_heads,)](
        is_wanted, maps.slot_block, maps.slot_used, lanes, allowance, candidates, candidate_scores,
        num_candidates, blocks, slots, counters, wanted.stride(0), num_blocks, num_slots, cap, kv_heads, heads_width,
        slot_width, cap_width, **row_shape(heads_width * cap_width, NUMBERS_PER_WARP),
    )  # fmt: skip
    return FetchPlan(blocks, slots, counters)
