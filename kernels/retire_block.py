"""Blocks that leave the ring into slots: a copy on the device, so it takes nothing of the link and of no allowance.

    kv[page_table[lane, a victim's slot], h] = kv[page_table[lane, K + b % 3], h]

for each (lane, KV head) h on its own. A block b that leaves the ring takes a slot of each head whose ranking wants it,
and of each that has an empty one; so block 0, which leaves first and is not ranked, takes one of each. The slot is the
first that is evictable (slots.py), and its former block is in no slot from then on. Elsewhere the block is dropped, so
its host copy must be there by then.
"""

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import repeat_valid
from minserve.kernels.slots import SlotMaps, check_slots, evictable_slots, eviction_order, lanes_and_heads, take_slots
from minserve.kernels.sparse_rows import RING, ring_column

NUM_WARPS = 4


def retire_block(
    retiring: torch.Tensor,
    wanted: torch.Tensor,
    row: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Takes blocks that leave the ring into slots; comes behind the step's fetches, before the ring's page is written.

    retiring: [entries] int64, the block that leaves each entry's ring (Ring.retiring), -1: none; in no slot yet
    wanted: [entries, 2, kv_heads, blocks] bool, what two rows want, retiring blocks being ranked; contiguous
    row: [entries] int64, which of them counts: the lookahead row, or the normal one if it runs again
    kv: [pages, kv_heads, 2, 16, head_dim], one layer's; page_table: [num_lanes, columns] int32, columns >= K + 3
    maps, lanes, step: as in `select_blocks`; all three maps are written. All contiguous.
    """
    entries, rows, kv_heads, num_blocks = wanted.shape
    check_slots(maps, lanes, step, kv, page_table)
    assert (wanted.dtype, retiring.dtype, row.dtype) == (torch.bool, torch.int64, torch.int64), wanted.dtype
    assert retiring.shape == row.shape == lanes.shape == (entries,), (retiring.shape, row.shape, lanes.shape)
    assert (rows, kv_heads, num_blocks <= maps.block_slot.shape[2]) == (2, kv.shape[1], True), (wanted.shape, kv.shape)
    assert all(each.is_contiguous() for each in (wanted, retiring, row))
    run = retire_block_triton if kv.is_cuda else retire_block_reference
    run(retiring, wanted, row, maps, lanes, step, kv, page_table)


def retire_block_reference(
    retiring: torch.Tensor,
    wanted: torch.Tensor,
    row: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    entries, _, kv_heads, _ = wanted.shape
    if entries == 0:
        return
    wanted = wanted[torch.arange(entries, device=row.device), row]
    lane, head = lanes_and_heads(lanes, kv_heads, 2)
    block = retiring.clamp_min(0)[:, None].expand(-1, kv_heads)
    slot_block = maps.slot_block[lane[:, 0]]
    slots, num_evictable = evictable_slots(slot_block, maps.slot_used[lane[:, 0]], wanted)
    is_taken = wanted.gather(2, block[..., None])[..., 0] | (slot_block < 0).any(dim=2)
    is_taken &= (num_evictable > 0) & ((retiring >= 0) & (lanes >= 0))[:, None]

    valid = repeat_valid(is_taken.flatten())
    page = page_table[lane, ring_column(block, slot_block.shape[2])].to(torch.int64)
    found = kv.view(-1, *kv.shape[2:]).index_select(0, (page * kv_heads + head).flatten()[valid.pick])
    lane, head = (each.expand(block.shape).flatten() for each in (lane, head))
    take_slots(maps, lane, head, slots[..., 0].flatten(), block.flatten(), valid, step, found, kv, page_table)


@triton.jit
def _retire_block_kernel(
    retiring,
    wanted,
    rows,
    slot_block,
    slot_used,
    block_slot,
    lanes,
    step,
    kv,
    page_table,
    num_blocks,
    max_blocks,
    num_slots,
    columns,
    ring: tl.constexpr,
    kv_heads: tl.constexpr,
    slot_width: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
):
    """One program for one KV head of an entry. size: of its K and V of a block; widths: powers of two, no less than the
    number of slots, and than size."""
    entry = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    lane = tl.load(lanes + entry)
    block = tl.load(retiring + entry)
    if (lane >= 0) & (block >= 0):
        lane_head = lane * kv_heads + head
        wanted += ((entry * 2 + tl.load(rows + entry)) * kv_heads + head) * num_blocks
        slot_block += lane_head * num_slots
        slot_used += lane_head * num_slots
        slot = tl.arange(0, slot_width)
        order, may_go, _ = eviction_order(slot_block, slot_used, wanted, num_blocks, slot, num_slots)
        order = tl.where(may_go, order, -0x7FFFFFFF)
        best = tl.max(order, 0)
        is_wanted = tl.load(wanted + block, mask=block < num_blocks, other=0) != 0
        # An empty slot's order is 0.
        if (best > -0x7FFFFFFF) & (is_wanted | (best == 0)):
            victim = tl.min(tl.where(order == best, slot, slot_width), 0)
            block_slot += lane_head * max_blocks
            evicted = tl.load(slot_block + victim)
            tl.store(block_slot + evicted, -1, mask=evicted >= 0)
            tl.store(block_slot + block, victim)
            tl.store(slot_block + victim, block.to(tl.int32))
            tl.store(slot_used + victim, tl.load(step))
            source = tl.load(page_table + lane * columns + num_slots + block % ring).to(tl.int64)
            target = tl.load(page_table + lane * columns + victim).to(tl.int64)
            offset = tl.arange(0, width)
            content = tl.load(kv + (source * kv_heads + head) * size + offset, mask=offset < size)
            tl.store(kv + (target * kv_heads + head) * size + offset, content, mask=offset < size)


def retire_block_triton(
    retiring: torch.Tensor,
    wanted: torch.Tensor,
    row: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    entries, _, kv_heads, num_blocks = wanted.shape
    num_slots, size = maps.slot_block.shape[2], kv[0, 0].numel()
    _retire_block_kernel[(entries * kv_heads,)](
        retiring,
        wanted.view(torch.uint8),
        row,
        *maps,
        lanes,
        step,
        kv,
        page_table,
        num_blocks,
        maps.block_slot.shape[2],
        num_slots,
        page_table.shape[1],
        RING,
        kv_heads,
        triton.next_power_of_2(num_slots),
        size,
        triton.next_power_of_2(size),
        num_warps=NUM_WARPS,
    )
