"""Making a resident lane sparse, in its own pages: for each layer and KV head the best blocks move into its slots.

    wanted = block 0 and the best K - 1 of [1, start), by the ranking of rank_blocks.py, nothing being in a slot
    slot s keeps block slot_blocks[s] where that is wanted; the wanted blocks whose page is no slot's, the lowest first,
    go into the other slots, the lowest first, of the first min(start, K)

A block moves by a copy of one head of its page. What a copy writes is a slot whose block is not wanted, and what it
reads is the page of a block that is, so copies may run in any order.

Blocks are ranked by the kernels of a step, and moved in plain torch, on any device. It is told by the host which lane,
and waits for the device: nobody demotes in every step.
"""

import torch

from minserve.kernels.build_digests import Digests, build_digests
from minserve.kernels.rank_blocks import rank_blocks
from minserve.kernels.score_blocks import LOOKAHEAD
from minserve.kernels.score_keys import expect_in_blocks
from minserve.kernels.select_blocks import SlotMaps
from minserve.kernels.shortlist_blocks import shortlist_length


def rank_for_demotion(
    kv: torch.Tensor,
    digests: Digests,
    block_slot: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    places: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Builds the digests of a lane's blocks [0, start), and says which of them each head wants: block 0 and `count` - 1
    others, [layers, kv_heads, start] bool.

    kv: [layers, pages, kv_heads, 2 (K, V), 16, head_dim]; digests: of [layers, places, ...]
    block_slot: [layers, kv_heads, max_blocks] int32, of the lane: -1, nothing is in a slot
    query: [layers, heads, head_dim], of the row that ranks; pages, places: [start] int64, start > 0.
    """
    num_layers, num_pages = kv.shape[:2]
    num_places, start, device = digests.extremes.shape[1], len(pages), kv.device
    lanes = torch.arange(num_layers, device=device)
    layer = lanes[:, None]
    flat = digests.view_all()
    own = (layer * num_places + places).contiguous()
    build_digests(kv.view(-1, *kv.shape[2:]), flat, (layer * num_pages + pages).flatten(), own.flatten())
    # On a GPU as wide as in all steps, for which the kernels have been compiled.
    table = torch.full((num_layers, block_slot.shape[2] if kv.is_cuda else start), -1, dtype=torch.int32, device=device)
    table[:, :start] = own
    end = torch.full_like(lanes, start)
    queries = query[:, None].expand(-1, 2, -1, -1).contiguous()
    logits = expect_in_blocks(queries, flat, table, lanes, end, shortlist_length(count))
    wanted = rank_blocks(logits, block_slot, lanes, end, count - 1).wanted[:, LOOKAHEAD, :, :start].contiguous()
    wanted[..., 0] = True
    return wanted


def demote_lane(
    kv: torch.Tensor,
    maps: SlotMaps,
    wanted: torch.Tensor,
    pages: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_blocks: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """Moves blocks into slots, and writes the lane's maps.

    kv: [layers, pages, kv_heads, 2 (K, V), 16, head_dim]
    maps: one lane's, [layers, kv_heads, ...]; whatever they hold is replaced
    wanted: [layers, kv_heads, start] bool, min(start, K) for each head; pages: [start] int64, where each block is
    slot_pages: [K] int64; slot_blocks: [K] int64, the block in each of these pages, -1: none; of blocks before start,
        and -1 in all slots from min(start, K) on. step: [1] int32.
    """
    num_layers, kv_heads, start = wanted.shape
    num_slots, device = len(slot_pages), kv.device
    num_filled = min(start, num_slots)
    assert pages.shape == (start,), (pages.shape, wanted.shape)
    assert (slot_blocks[num_filled:] == -1).all(), slot_blocks
    assert (wanted.sum(dim=2) == num_filled).all(), "a head wants more blocks, or fewer, than there are slots"

    block = slot_blocks.expand(num_layers, kv_heads, -1).clone()
    is_kept = (block >= 0) & wanted.gather(2, block.clamp_min(0))
    in_slot = torch.zeros_like(wanted).scatter_(2, slot_blocks[slot_blocks >= 0].expand(num_layers, kv_heads, -1), True)
    is_moved = wanted & ~in_slot
    is_vacant = ~is_kept & (torch.arange(num_slots, device=device) < num_filled)
    # As many blocks move as slots are vacant, of each head; both in ascending order.
    layer, head, source = is_moved.nonzero(as_tuple=True)
    target = is_vacant.nonzero(as_tuple=True)[2]
    block[is_vacant] = source
    for number in range(num_layers):  # not all at once: that would take the memory of a request's pages again
        own = layer == number
        kv[number, slot_pages[target[own]], head[own]] = kv[number, pages[source[own]], head[own]]

    maps.slot_block.copy_(block)
    maps.slot_used.copy_(step.expand_as(block))
    slot = torch.arange(num_filled, device=device, dtype=torch.int32).expand(num_layers, kv_heads, -1)
    maps.block_slot.fill_(-1).scatter_(2, block[..., :num_filled], slot)
