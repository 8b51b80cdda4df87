"""Blocks into slots: from host blocks, as planned by select_blocks.py, and from the ring, when they leave it.

    page of slot s = page_table[lane, s]           page of block b in the ring = page_table[lane, K + b % 3]

    fetch:   kv[page of slots[i], h]  = host[host_table[lane, blocks[i]], layer, h]
    retire:  kv[page of a victim, h]  = kv[page of the block in the ring, h]

for each (lane, KV head) h on its own. The slot's former block is in no slot from then on. A block that leaves the ring
takes a slot of each head whose ranking wants it, chosen as select_blocks.py chooses, and of each that has an empty one;
so block 0, which leaves first and is not ranked, takes one of each. Elsewhere it is dropped, so its host copy must be
there by then.

The torch reference reads host blocks that lie on the device of the pages.
"""

import torch

from minserve.kernels.masked_write import Valid, repeat_valid, write_repeated
from minserve.kernels.select_blocks import FetchPlan, SlotMaps, evictable_slots
from minserve.kernels.sparse_rows import RING, ring_column


def fetch_blocks(
    plan: FetchPlan,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    host: torch.Tensor,
    layer: int,
    host_table: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Carries the plan out: writes pages of slots and all three maps.

    plan, maps, lanes, step: as in `select_blocks`
    host: [host_blocks, layers, kv_heads, 2 (K, V), 16, head_dim], of the pages' dtype; layer: the one that kv is of
    host_table: [num_lanes, max_blocks] int32, the host block of each block, -1: none. What has none is not fetched
    kv: [pages, kv_heads, 2, 16, head_dim], one layer's; page_table: [num_lanes, columns] int32. All contiguous.
    """
    entries, kv_heads, _ = plan.blocks.shape
    _check(maps, lanes, step, kv, page_table)
    assert lanes.shape == (entries,), (lanes.shape, plan.blocks.shape)
    assert plan.blocks.shape == plan.slots.shape, (plan.blocks.shape, plan.slots.shape)
    assert kv_heads == kv.shape[1], (plan.blocks.shape, kv.shape)
    assert (host.shape[2:], host.dtype) == (kv.shape[1:], kv.dtype), (host.shape, host.dtype, kv.shape, kv.dtype)
    assert 0 <= layer < host.shape[1], (layer, host.shape)
    num_lanes, _, max_blocks = maps.block_slot.shape
    assert (host_table.shape, host_table.dtype) == ((num_lanes, max_blocks), torch.int32), host_table.shape
    assert host.is_contiguous()
    fetch_blocks_reference(plan, maps, lanes, step, host, layer, host_table, kv, page_table)


def fetch_blocks_reference(
    plan: FetchPlan,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    host: torch.Tensor,
    layer: int,
    host_table: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    if plan.blocks.numel() == 0:
        return
    num_layers, kv_heads = host.shape[1:3]
    lane, head = (each.expand(plan.blocks.shape).flatten() for each in _lanes_and_heads(lanes, kv_heads, 3))
    block, slot = (each.flatten().to(torch.int64) for each in (plan.blocks, plan.slots))
    host_block = host_table[lane, block.clamp_min(0)].to(torch.int64)
    valid = repeat_valid((block >= 0) & (host_block >= 0) & (lanes >= 0).repeat_interleave(plan.blocks[0].numel()))

    source = (host_block.clamp_min(0) * num_layers + layer) * kv_heads + head
    found = host.view(-1, *host.shape[3:]).index_select(0, source[valid.pick])
    _take_slots(maps, lane, head, slot, block, valid, step, found, kv, page_table)


def retire_block(
    retiring: torch.Tensor,
    wanted: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Takes blocks that leave the ring into slots; comes behind the step's fetches, before the ring's page is written.

    retiring: [entries] int64, the block that leaves each entry's ring (Ring.retiring), -1: none; in no slot yet
    wanted: [entries, kv_heads, blocks] bool, what the lookahead row wants, retiring blocks being ranked
    kv: [pages, kv_heads, 2, 16, head_dim], one layer's; page_table: [num_lanes, columns] int32, columns >= K + 3
    maps, lanes, step: as in `select_blocks`; all three maps are written. All contiguous.
    """
    entries, kv_heads, num_blocks = wanted.shape
    _check(maps, lanes, step, kv, page_table)
    assert (wanted.dtype, retiring.dtype) == (torch.bool, torch.int64), (wanted.dtype, retiring.dtype)
    assert retiring.shape == lanes.shape == (entries,), (retiring.shape, lanes.shape, wanted.shape)
    assert (kv_heads, num_blocks <= maps.block_slot.shape[2]) == (kv.shape[1], True), (wanted.shape, kv.shape)
    retire_block_reference(retiring, wanted, maps, lanes, step, kv, page_table)


def retire_block_reference(
    retiring: torch.Tensor,
    wanted: torch.Tensor,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    entries, kv_heads, _ = wanted.shape
    if entries == 0:
        return
    lane, head = _lanes_and_heads(lanes, kv_heads, 2)
    block = retiring.clamp_min(0)[:, None].expand(-1, kv_heads)
    slot_block = maps.slot_block[lane[:, 0]]
    slots, num_evictable = evictable_slots(slot_block, maps.slot_used[lane[:, 0]], wanted)
    is_taken = wanted.gather(2, block[..., None])[..., 0] | (slot_block < 0).any(dim=2)
    is_taken &= (num_evictable > 0) & ((retiring >= 0) & (lanes >= 0))[:, None]

    valid = repeat_valid(is_taken.flatten())
    page = page_table[lane, ring_column(block, slot_block.shape[2])].to(torch.int64)
    found = kv.view(-1, *kv.shape[2:]).index_select(0, (page * kv_heads + head).flatten()[valid.pick])
    lane, head = (each.expand(block.shape).flatten() for each in (lane, head))
    _take_slots(maps, lane, head, slots[..., 0].flatten(), block.flatten(), valid, step, found, kv, page_table)


def _take_slots(
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


def _lanes_and_heads(lanes: torch.Tensor, kv_heads: int, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lanes, 0 for padding, along the first of so many dimensions, and heads along the second."""
    rest = [1] * (dims - 2)
    return lanes.clamp_min(0).view(-1, 1, *rest), torch.arange(kv_heads, device=lanes.device).view(1, -1, *rest)


def _check(maps: SlotMaps, lanes: torch.Tensor, step: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor) -> None:
    num_lanes, kv_heads, num_slots = maps.slot_block.shape
    maps.check(kv_heads)
    assert (kv.dim(), kv.shape[1], kv.shape[2]) == (5, kv_heads, 2), (kv.shape, maps.slot_block.shape)
    assert page_table.shape[0] == num_lanes, (page_table.shape, maps.slot_block.shape)
    assert page_table.shape[1] >= num_slots + RING, (page_table.shape, num_slots)
    assert (page_table.dtype, lanes.dtype) == (torch.int32, torch.int64), (page_table.dtype, lanes.dtype)
    assert (step.shape, step.dtype) == ((1,), torch.int32), (step.shape, step.dtype)
    assert all(tensor.is_contiguous() for tensor in (kv, page_table, lanes))
