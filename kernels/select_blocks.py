"""What to fetch for each KV head of a layer, and into which slots: the working set's one decision, without the host.

Of a (lane, KV head), with `wanted` the blocks that the lookahead row's ranking wants:

    hits       = wanted, and in a slot
    misses     = wanted, and neither in a slot nor in the ring
    evictable  = slots: the empty ones first, by number; then those whose block is not wanted, the longest unselected
                 first, then by number. Block 0's never
    candidates = the best misses by score, then by lower block: at most C, and at most as many as there are evictable
    admitted   = of all candidates of the lane in this layer the best by score, then by head, then by block: as many as
                 its allowance

The i-th admitted of a head goes into its i-th evictable slot. A head's share of the allowance follows from scores
alone: whoever computes it, in whatever order, gets the same. What is not admitted is cut: what the slots hold serves in
its place, and the block competes again in the next step.

The ring is that of this step's rows, so a block that leaves it now is no miss here: `retire_block` (fetch_blocks.py)
takes care of it, after the fetches.
"""

from typing import NamedTuple

import torch

from minserve.kernels.masked_write import write_where


class SlotMaps(NamedTuple):
    """Which block each slot holds, one layer's, for every lane and KV head on its own. The first and last are inverse.

    slot_block: [num_lanes, kv_heads, slots] int32, -1: empty. A filled slot is never emptied
    slot_used: [num_lanes, kv_heads, slots] int32, the step that last wanted the slot's block
    block_slot: [num_lanes, kv_heads, max_blocks] int32, -1: in no slot
    """

    slot_block: torch.Tensor
    slot_used: torch.Tensor
    block_slot: torch.Tensor

    def check(self, kv_heads: int) -> None:
        num_lanes, _, num_slots = self.slot_block.shape
        assert self.slot_block.shape == self.slot_used.shape == (num_lanes, kv_heads, num_slots)
        assert self.block_slot.shape[:2] == (num_lanes, kv_heads), self.block_slot.shape
        assert all(table.dtype == torch.int32 and table.is_contiguous() for table in self)


class FetchPlan(NamedTuple):
    """blocks, slots: [entries, kv_heads, C] int32, a head's fetches one after the other, and -1 behind them.

    counters: [entries, kv_heads, 4] int32:
        hits, misses; cut: misses that are not fetched
        surprises: blocks that the normal row wants and that are neither in a slot nor in the ring
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

    wanted, scores, normal_wanted: [entries, kv_heads, blocks], from `wanted_blocks` of the lookahead row, what it was
        given (float32), and the same of the normal row; blocks <= max_blocks, and any that a slot holds is among them
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
    assert (wanted.dtype, normal_wanted.dtype) == (torch.bool, torch.bool), (wanted.dtype, normal_wanted.dtype)
    assert scores.dtype == torch.float32, scores.dtype
    assert num_blocks <= max_blocks, (num_blocks, max_blocks)
    assert lanes.shape == ring_start.shape == (entries,), (lanes.shape, ring_start.shape, wanted.shape)
    assert lanes.dtype == ring_start.dtype == torch.int64, (lanes.dtype, ring_start.dtype)
    assert (sparse.shape, sparse.dtype) == ((num_lanes,), torch.bool), (sparse.shape, sparse.dtype)
    assert (allowance.shape, allowance.dtype) == ((num_lanes,), torch.int32), (allowance.shape, allowance.dtype)
    assert (step.shape, step.dtype) == ((1,), torch.int32), (step.shape, step.dtype)
    assert cap >= 0, cap
    assert caps is None or (caps.shape, caps.dtype) == (lanes.shape, torch.int64), (caps, lanes.shape)
    return select_blocks_reference(
        wanted, scores, normal_wanted, maps, lanes, sparse, ring_start, allowance, step, cap, caps
    )


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
    slots = torch.where(admitted, _first(slots, cap), -1)

    used = torch.where(_of_slots(slot_block, wanted), step, slot_used)
    write_where(maps.slot_used, lanes, used, takes_part)
    num_misses = misses.sum(dim=-1)
    counters = (hits.sum(dim=-1), num_misses, num_misses - admitted.sum(dim=-1), (normal_wanted & may_miss).sum(dim=-1))
    return FetchPlan(
        torch.where(admitted, blocks, -1).to(torch.int32),
        slots.to(torch.int32),
        torch.stack(counters, dim=-1).to(torch.int32),
    )


def evictable_slots(
    slot_block: torch.Tensor, slot_used: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(all slots, evictable ones first and in the order in which they are taken [..., slots] int64, how many of them
    may be taken [...]). slot_block, slot_used: [..., slots] int32; wanted: [..., blocks] bool."""
    empty, last = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    kept = _of_slots(slot_block, wanted) | (slot_block == 0)
    order = torch.where(kept, last, slot_used.to(torch.int64)).masked_fill(slot_block < 0, empty)
    return order.sort(dim=-1, stable=True).indices, (~kept).sum(dim=-1)


def _of_slots(slot_block: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Whether each slot's block is wanted."""
    return wanted.gather(-1, slot_block.clamp_min(0).to(torch.int64)) & (slot_block >= 0)


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


def _within_allowance(scores: torch.Tensor, allowance: torch.Tensor) -> torch.Tensor:
    """Which are among the best of their entry's: [entries, kv_heads, C] bool. -inf never is. allowance: [entries]."""
    flat = scores.flatten(1)
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order))
    return ((rank < allowance[:, None]) & (flat > -torch.inf)).view(scores.shape)
