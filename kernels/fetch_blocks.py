"""Blocks from host memory into slots, as planned by select_blocks.py.

    kv[page_table[lane, slots[i]], h] = host[host_table[lane, blocks[i]], layer, h]

for each (lane, KV head) h on its own. The slot's former block is in no slot from then on. What comes from the ring is
in retire_block.py.

On a GPU the host blocks lie in pinned memory, which kernels read by its address over the link (unified virtual
addressing): for blocks of 8 KB that is nearly as fast as one large copy, where a copy call for each block reaches a
fiftieth. A first kernel looks up what there is to fetch, writes the maps, and lists the copies. A second has few
programs, as many as fill the link, and these walk over the list; so a plan that fetches little takes little. The list's
order is anybody's guess, and no copy depends on another.

Host blocks may be in 8 bits (fp8_blocks.py). Then half as much crosses the link, and what has come is multiplied by
scales[host_table[lane, blocks[i]], layer, h], one for K and one for V, in float32, and rounded to the pages' dtype.

The torch reference reads host blocks that lie on the device of the pages.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from minserve.kernels.fp8_blocks import check_scales, dequantize_blocks
from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import repeat_valid
from minserve.kernels.retire_block import retire_block
from minserve.kernels.select_blocks import FetchPlan
from minserve.kernels.slots import SlotMaps, check_slots, lanes_and_heads, take_slots

__all__ = ["fetch_blocks", "retire_block"]

HERE = nullcontext()
"""On the current stream."""

PROGRAMS, PROGRAMS_FP8 = 48, 64
"""Of one warp each, with two blocks under way: what fills the link beside products (50 GB/s of 55 on an H200). Fewer
programs of more warps would leave more SMs alone, but they are slower, and a product beside them is not faster."""

TILE = 1024
"""Fetches that a program looks up at once."""


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
    scales: torch.Tensor | None = None,
    copying: AbstractContextManager[Any] = HERE,
) -> Sequence[torch.Tensor]:
    """Carries the plan out: writes pages of slots and all three maps. Returns what has to live until it is done, if
    that is on another stream than the current one, whose allocator would give it to others.

    plan, maps, lanes, step: as in `select_blocks`
    host: [host_blocks, layers, kv_heads, 2 (K, V), 16, head_dim], of the pages' dtype, or float8_e4m3fn where there are
        scales, in pinned memory or on the pages' device; layer: the one that kv is of
    host_table: [num_lanes, max_blocks] int32, the host block of each block, -1: none. What has none is not fetched
    kv: [pages, kv_heads, 2, 16, head_dim], one layer's; page_table: [num_lanes, columns] int32. All contiguous.
    scales: [host_blocks, layers, kv_heads, 2] float32, on the pages' device; None: of host blocks in their dtype
    copying: what reads host blocks is launched within it, as on another stream; on a CPU, all is
    """
    entries, kv_heads, _ = plan.blocks.shape
    check_slots(maps, lanes, step, kv, page_table)
    assert lanes.shape == (entries,), (lanes.shape, plan.blocks.shape)
    assert plan.blocks.shape == plan.slots.shape, (plan.blocks.shape, plan.slots.shape)
    assert kv_heads == kv.shape[1], (plan.blocks.shape, kv.shape)
    assert host.shape[2:] == kv.shape[1:], (host.shape, kv.shape)
    check_scales(host, scales, kv)
    assert 0 <= layer < host.shape[1], (layer, host.shape)
    num_lanes, _, max_blocks = maps.block_slot.shape
    assert (host_table.shape, host_table.dtype) == ((num_lanes, max_blocks), torch.int32), host_table.shape
    assert all(each.is_contiguous() for each in (plan.blocks, plan.slots, host, host_table))
    run = fetch_blocks_triton if kv.is_cuda else fetch_blocks_reference
    return run(plan, maps, lanes, step, host, layer, host_table, kv, page_table, scales, copying)


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
    scales: torch.Tensor | None = None,
    copying: AbstractContextManager[Any] = HERE,
) -> Sequence[torch.Tensor]:
    if plan.blocks.numel() == 0:
        return ()
    num_layers, kv_heads = host.shape[1:3]
    lane, head = (each.expand(plan.blocks.shape).flatten() for each in lanes_and_heads(lanes, kv_heads, 3))
    block, slot = (each.flatten().to(torch.int64) for each in (plan.blocks, plan.slots))
    host_block = host_table[lane, block.clamp_min(0)].to(torch.int64)
    valid = repeat_valid((block >= 0) & (host_block >= 0) & (lanes >= 0).repeat_interleave(plan.blocks[0].numel()))

    source = (host_block.clamp_min(0) * num_layers + layer) * kv_heads + head
    source = source[valid.pick]
    found = host.view(-1, *host.shape[3:]).index_select(0, source)
    if scales is not None:
        found = dequantize_blocks(found, scales.view(-1, 2).index_select(0, source), kv.dtype)
    with copying:
        take_slots(maps, lane, head, slot, block, valid, step, found, kv, page_table)
    return ()


@triton.jit(do_not_specialize=["num_fetches", "cap", "layer"])
def _list_copies_kernel(
    blocks,
    slots,
    lanes,
    step,
    slot_block,
    slot_used,
    block_slot,
    host_table,
    page_table,
    copies,
    num_copies,
    num_fetches,
    cap,
    layer,
    num_layers,
    num_slots,
    max_blocks,
    columns,
    kv_heads: tl.constexpr,
    tile: tl.constexpr,
):
    """Writes the maps, and (row of host, row of kv) of each copy, rows being a head's."""
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    block = tl.load(blocks + number, mask=number < num_fetches, other=-1)
    head = number // cap % kv_heads
    lane = tl.load(lanes + number // cap // kv_heads, mask=block >= 0, other=-1)
    host_block = tl.load(host_table + lane * max_blocks + block, mask=lane >= 0, other=-1).to(tl.int64)
    valid = host_block >= 0

    slot = tl.load(slots + number, mask=valid, other=0)
    slot_at = (lane * kv_heads + head) * num_slots + slot
    block_at = (lane * kv_heads + head) * max_blocks
    evicted = tl.load(slot_block + slot_at, mask=valid, other=-1)
    # No block that is evicted is fetched in the same plan: one is not wanted, the other is.
    tl.store(block_slot + block_at + evicted, -1, mask=valid & (evicted >= 0))
    tl.store(block_slot + block_at + block, slot, mask=valid)
    tl.store(slot_block + slot_at, block, mask=valid)
    tl.store(slot_used + slot_at, tl.zeros_like(slot) + tl.load(step), mask=valid)

    page = tl.load(page_table + lane * columns + slot, mask=valid, other=0).to(tl.int64)
    count = tl.sum(valid.to(tl.int32), 0)
    if count > 0:
        place = tl.atomic_add(num_copies, count) + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(copies + 2 * place, (host_block * num_layers + layer) * kv_heads + head, mask=valid)
        tl.store(copies + 2 * place + 1, page * kv_heads + head, mask=valid)


@triton.jit
def _load_copy(copies, number, count):
    """(source, target), behind the last of them (0, 0)."""
    at = copies + 2 * number
    return tl.load(at, mask=number < count, other=0), tl.load(at + 1, mask=number < count, other=0)


@triton.jit
def _load_piece(host, scales, source, is_wanted, offset, size: tl.constexpr, has_scales: tl.constexpr):
    """(what is there, the scales of its K and V); if it is not wanted, nothing is read of the host's memory."""
    content = tl.load(host + source * size + offset, mask=offset < tl.where(is_wanted, size, 0))
    if has_scales:
        return content, tl.load(scales + 2 * source), tl.load(scales + 2 * source + 1)
    return content, 1.0, 1.0


@triton.jit
def _copy_kernel(
    copies, num_copies, host, scales, kv, size: tl.constexpr, width: tl.constexpr, has_scales: tl.constexpr
):
    """size: of one head's K and V of a block; width: rounded up to a power of two. A program reads one piece while
    another is on its way, and knows where the next one is: what takes time is to wait, the more so beside products."""
    offset = tl.arange(0, width)
    first, count, step = tl.program_id(0), tl.load(num_copies), tl.num_programs(0)
    source, target = _load_copy(copies, first, count)
    content, k_scale, v_scale = _load_piece(host, scales, source, first < count, offset, size, has_scales)
    source, next_target = _load_copy(copies, first + step, count)
    for number in range(first, count, step):
        is_more = number + step < count
        coming, next_k, next_v = _load_piece(host, scales, source, is_more, offset, size, has_scales)
        source, target_after = _load_copy(copies, number + 2 * step, count)
        if has_scales:
            scale = tl.where(offset < size // 2, k_scale, v_scale)
            content = (content.to(tl.float32) * scale).to(kv.dtype.element_ty)
        tl.store(kv + target * size + offset, content, mask=offset < size)
        content, k_scale, v_scale, target, next_target = coming, next_k, next_v, next_target, target_after


def fetch_blocks_triton(
    plan: FetchPlan,
    maps: SlotMaps,
    lanes: torch.Tensor,
    step: torch.Tensor,
    host: torch.Tensor,
    layer: int,
    host_table: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    scales: torch.Tensor | None = None,
    copying: AbstractContextManager[Any] = HERE,
) -> Sequence[torch.Tensor]:
    num_fetches = plan.blocks.numel()
    copies, num_copies = lanes.new_empty(num_fetches, 2), lanes.new_zeros(1, dtype=torch.int32)
    _list_copies_kernel[(triton.cdiv(num_fetches, TILE),)](
        plan.blocks,
        plan.slots,
        lanes,
        step,
        *maps,
        host_table,
        page_table,
        copies,
        num_copies,
        num_fetches,
        plan.blocks.shape[2],
        layer,
        host.shape[1],
        maps.slot_block.shape[2],
        host_table.shape[1],
        page_table.shape[1],
        kv.shape[1],
        TILE,
        num_warps=4,
    )
    with copying:
        copy_pieces(copies, num_copies, host, scales, kv.flatten(0, 1))
    return copies, num_copies


def copy_pieces(
    copies: torch.Tensor, num_copies: torch.Tensor, host: torch.Tensor, scales: torch.Tensor | None, kv: torch.Tensor
) -> None:
    """On a GPU: kv[target] = host[source], by the kernel that fetches.

    copies: [n, 2 (source, target)] int64; num_copies: [1] int32, how many of these
    host: pieces, [2, 16, head_dim] of one head each, in pinned memory; kv: [any, 2, 16, head_dim]
    scales: of each piece, [2] float32; or None
    """
    size, programs = kv[0].numel(), min(PROGRAMS if scales is None else PROGRAMS_FP8, len(copies))
    _copy_kernel[(programs,)](
        copies, num_copies, host, scales, kv, size, triton.next_power_of_2(size), scales is not None, num_warps=1
    )
