"""Which block each slot of a working set holds, and in what order slots are taken for others.

evictable = the empty slots first, by number; then those whose block is not wanted, the longest unselected first,
            then by number. Block 0's never: it is pinned
"""

from typing import Any, NamedTuple

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import Valid, write_repeated
from minserve.kernels.sparse_rows import RING


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


def evictable_slots(
    slot_block: torch.Tensor, slot_used: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(all slots, evictable ones first and in the order in which they are taken [..., slots] int64, how many of them
    may be taken [...]). slot_block, slot_used: [..., slots] int32; wanted: [..., blocks] bool."""
    empty, last = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    kept = are_wanted(slot_block, wanted) | (slot_block == 0)
    order = torch.where(kept, last, slot_used.to(torch.int64)).masked_fill(slot_block < 0, empty)
    return order.sort(dim=-1, stable=True).indices, (~kept).sum(dim=-1)


def are_wanted(slot_block: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Whether each slot's block is wanted."""
    return wanted.gather(-1, slot_block.clamp_min(0).to(torch.int64)) & (slot_block >= 0)


def take_slots(
    maps: SlotMaps,
    lane: torch.Tensor,
    head: torch.Tensor,
    slot: torch.Tensor,
    block: torch.Tensor,
    valid: Valid,
    step: torch.Tensor,
    content: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Puts blocks into slots. lane, head, slot, block: [n] int64, those of what is valid within bounds; content:
    [n, 2, 16, head_dim], in the order of valid.pick."""
    (_, kv_heads, num_slots), max_blocks = maps.slot_block.shape, maps.block_slot.shape[2]
    lane, head, slot, block = (each[valid.pick].clamp_min(0) for each in (lane, head, slot, block))
    slot_at = (lane * kv_heads + head) * num_slots + slot
    block_at = (lane * kv_heads + head) * max_blocks
    slot_block, slot_used, block_slot = (table.view(-1) for table in maps)

    evicted = slot_block[slot_at].to(torch.int64)
    # An empty slot evicts nobody; the entry that is cleared in its stead is written right after.
    write_repeated(block_slot, block_at + torch.where(evicted >= 0, evicted, block), -1, valid.some)
    write_repeated(block_slot, block_at + block, slot.to(torch.int32), valid.some)
    write_repeated(slot_block, slot_at, block.to(torch.int32), valid.some)
    write_repeated(slot_used, slot_at, step, valid.some)
    page = page_table[lane, slot].to(torch.int64)
    write_repeated(kv.view(-1, *kv.shape[2:]), page * kv_heads + head, content, valid.some)


def lanes_and_heads(lanes: torch.Tensor, kv_heads: int, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lanes, 0 for padding, along the first of so many dimensions, and heads along the second."""
    rest = [1] * (dims - 2)
    return lanes.clamp_min(0).view(-1, 1, *rest), torch.arange(kv_heads, device=lanes.device).view(1, -1, *rest)


def check_slots(
    maps: SlotMaps, lanes: torch.Tensor, step: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor
) -> None:
    num_lanes, kv_heads, num_slots = maps.slot_block.shape
    maps.check(kv_heads)
    assert (kv.dim(), kv.shape[1], kv.shape[2]) == (5, kv_heads, 2), (kv.shape, maps.slot_block.shape)
    assert page_table.shape[0] == num_lanes, (page_table.shape, maps.slot_block.shape)
    assert page_table.shape[1] >= num_slots + RING, (page_table.shape, num_slots)
    assert (page_table.dtype, lanes.dtype) == (torch.int32, torch.int64), (page_table.dtype, lanes.dtype)
    assert (step.shape, step.dtype) == ((1,), torch.int32), (step.shape, step.dtype)
    assert all(tensor.is_contiguous() for tensor in (kv, page_table, lanes))


@triton.jit
def eviction_order(slot_block, slot_used, wanted, num_blocks, slot, num_slots) -> Any:
    """(an int32 for each slot, the greater the sooner it is taken, whether it may be taken, whether its block is
    wanted). The first two: where a head's begin; wanted: its row, uint8; slot: [width]."""
    inside = slot < num_slots
    block = tl.load(slot_block + slot, mask=inside, other=0)
    used = tl.load(slot_used + slot, mask=inside, other=0)
    known = inside & (block >= 0) & (block < num_blocks)
    is_wanted = tl.load(wanted + block, mask=known, other=0) != 0
    # The step that last wanted a block is no less than 0, so that what is empty comes before all else.
    return tl.where(block < 0, 0, -1 - used), inside & (block != 0) & ~is_wanted, is_wanted
