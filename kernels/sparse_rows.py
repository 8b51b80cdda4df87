"""The rows of sparse lanes as attention sees them: keys in pages named by a table, and how many of them.

A sparse lane has K + 3 pages. Its page table's columns are

    [0, K)        slots: full blocks, for each layer and KV head of its own choice
    [K, K + 3)    the ring: block b in column K + b % 3, for all of them

and a row at position p sees all filled slots, and of the ring the blocks [start, p // 16], up to p. RoPE is in the keys
already, so the order is free. This one makes it an ordinary row of `decode_attention`, dense and sparse lanes alike:

    filled slots 0, 1, ... | block start | start + 1 | start + 2         length = 16 filled + p + 1 - 16 start

So that kernel needs no change: it is given `SparseRows.page_table`, whose rows are entries, in place of the lanes' own.

**How many slots are filled is one number for each lane**: min(start, K), the same for all layers and heads, kept
nowhere. Slots fill from 0 up and are never emptied. While K blocks or fewer have left the ring, each head holds all of
them: a block that leaves goes into an empty slot wherever there is one (`retire_block` does not even ask the ranking
then), and nothing that is held is missed, so no fetch takes a slot. From then on all are full, and a block only takes
another's place. Demotion and loading keep that, if they fill the first min(start, K) slots of each head.

The ring starts one block before the one that a step's first row is in, a step late. A background pass works beside its
step's foreground and knows only where that step began; it retires what the *next* step's ring will not have:

    start(t + 1) = max((num_tokens(t) - 1) // 16 - 1, 0)       retired by the background of t: [start(t), start(t + 1))

In the step that crosses into a new block, the ring is that block and two before it. Its rows must not reach the block
behind, whose page is that of the block being retired. They do not if the drafts that one step accepts and the drafts of
the next are 15 at most, together: the first row is then at most `accepted` behind the block's edge.
"""

import math
from typing import NamedTuple

import torch

from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import write_where

RING = 3
"""Local pages."""

WIDTH, NUM_WARPS = 4096, 8
"""Columns of a page table that a program takes at once, and its warps."""


def ring_column(block: torch.Tensor, num_slots: int) -> torch.Tensor:
    """The column of a sparse lane's page table in which a block of the ring lies."""
    return num_slots + block % RING


class Ring(NamedTuple):
    """Of each entry, [entries] int64; 0 for who is not sparse. A step's rows see the ring from `start` on.

    next_start: where the next step's starts. [1, next_start) are the blocks that this step ranks.
    retiring: the block that leaves; -1: none.
    """

    start: torch.Tensor
    next_start: torch.Tensor
    retiring: torch.Tensor


class LaneTables(NamedTuple):
    """num_tokens, ring_start: [num_lanes] int64, ring_start: set to (num_tokens - 1) // 16 - 1, or 0, as a lane becomes
    sparse; sparse: [num_lanes] bool. looks_ahead: [num_lanes] bool, by the row behind its num_verified drafts, which is
    [num_lanes] int64, else by its first row."""

    num_tokens: torch.Tensor
    ring_start: torch.Tensor
    sparse: torch.Tensor
    looks_ahead: torch.Tensor
    num_verified: torch.Tensor


def advance_ring(
    num_tokens: torch.Tensor, ring_start: torch.Tensor, sparse: torch.Tensor, lanes: torch.Tensor, block_size: int = 16
) -> Ring:
    """A step's ring, by the lanes' tables as the step finds them; ring_start moves on to the next step's."""
    lane = lanes.clamp_min(0)
    takes_part = (lanes >= 0) & sparse[lane]
    start = ring_start[lane]
    wanted = (num_tokens[lane] - 1) // block_size - 1
    # One block a step, whatever happens: there is one retirement.
    next_start = wanted.maximum(start).minimum(start + 1)
    write_where(ring_start, lanes, next_start, takes_part)
    retiring = torch.where(takes_part & (next_start > start), start, -1)
    return Ring(torch.where(takes_part, start, 0), torch.where(takes_part, next_start, 0), retiring)


class SparseRows(NamedTuple):
    """The arguments of `decode_batch` and the places of `norm_rope_store`, for a step of dense and sparse lanes.

    page_table: [entries, columns] int32; entries: [entries] int64, an entry's row of it, -1: padding;
    lengths, places: [rows] int64.
    """

    page_table: torch.Tensor
    entries: torch.Tensor
    lengths: torch.Tensor
    places: torch.Tensor


def begin_rows(
    lengths: torch.Tensor,
    places: torch.Tensor,
    page_table: torch.Tensor,
    tables: LaneTables,
    lanes: torch.Tensor,
    given: torch.Tensor,
    num_slots: int,
    block_size: int = 16,
) -> tuple[SparseRows, torch.Tensor]:
    """A step's rows, once for all layers, and which of its rows each lane looks ahead by, [entries] int64: the last for
    who is not sparse, as a lane that is resident yet is ranked by that when it is demoted. Rows of other lanes than
    sparse ones stay as they are. tables.ring_start moves on to the next step's.

    lengths, places: [rows] int64 from `step_inputs`: the tokens up to and with the row's own, 0: none; and -1 where
        nothing is stored. The place that stands there for a sparse row is not looked at
    page_table: [num_lanes, columns] int32, contiguous, columns >= K + 3
    lanes: [entries] int64, no lane twice, -1: padding
    given: [4, entries] int64, written: the sparse ones of lanes, -1 for others, and the fields of `Ring`; num_slots: K.
    """
    (entries,) = lanes.shape
    num_lanes, columns = page_table.shape
    assert lengths.shape == places.shape == (len(lengths),), (lengths.shape, places.shape)
    assert len(lengths) % max(entries, 1) == 0, (lengths.shape, lanes.shape)
    assert all(table.shape == (num_lanes,) for table in tables), [table.shape for table in tables]
    assert tables.sparse.dtype == tables.looks_ahead.dtype == torch.bool
    numbers = (lengths, places, lanes, given, tables.num_tokens, tables.ring_start, tables.num_verified)
    assert all(tensor.dtype == torch.int64 for tensor in numbers), [tensor.dtype for tensor in numbers]
    assert (page_table.dtype, given.shape, given.stride(1)) == (torch.int32, (4, entries), 1), given.shape
    assert 1 <= num_slots <= columns - RING, (num_slots, columns)
    assert all(tensor.is_contiguous() for tensor in (lengths, places, page_table, *tables, lanes))
    run = begin_rows_triton if lanes.is_cuda else begin_rows_reference
    return run(lengths, places, page_table, tables, lanes, given, num_slots, block_size)


def begin_rows_reference(
    lengths: torch.Tensor,
    places: torch.Tensor,
    page_table: torch.Tensor,
    tables: LaneTables,
    lanes: torch.Tensor,
    given: torch.Tensor,
    num_slots: int,
    block_size: int,
) -> tuple[SparseRows, torch.Tensor]:
    num_tokens, ring_start, sparse, looks_ahead, num_verified = tables
    ring = advance_ring(num_tokens, ring_start, sparse, lanes, block_size)
    own, last = lanes.clamp_min(0), len(lengths) // max(len(lanes), 1) - 1
    takes_part = (lanes >= 0) & sparse[own]
    given[0], given[1], given[2], given[3] = torch.where(takes_part, lanes, -1), *ring
    behind = torch.where(looks_ahead[own], num_verified[own] + 1, 0).clamp_max(last)
    rows = sparse_rows(lengths, places, page_table, sparse, lanes, ring.start, num_slots, block_size)
    return rows, torch.where(takes_part, behind, last)


def sparse_rows(
    lengths: torch.Tensor,
    places: torch.Tensor,
    page_table: torch.Tensor,
    sparse: torch.Tensor,
    lanes: torch.Tensor,
    start: torch.Tensor,
    num_slots: int,
    block_size: int = 16,
) -> SparseRows:
    """start: [entries] int64, Ring.start; the rest as in `begin_rows`."""
    lane = lanes.clamp_min(0)
    is_sparse = ((lanes >= 0) & sparse[lane])[:, None]
    filled = start.clamp_max(num_slots)[:, None]
    column = torch.arange(page_table.shape[1], device=lanes.device)
    seen = torch.where(is_sparse & (column >= filled), ring_column(start[:, None] + column - filled, num_slots), column)
    table = page_table[lane]

    length = lengths.view(len(lanes), -1)
    shorter = (length - block_size * (start[:, None] - filled)).maximum(torch.zeros_like(length))
    position = length - 1
    page = table.gather(1, ring_column(position // block_size, num_slots)).to(torch.int64)
    own_place = torch.where(places.view(length.shape) >= 0, page * block_size + position % block_size, -1)
    return SparseRows(
        table.gather(1, seen),
        torch.where(lanes >= 0, torch.arange(len(lanes), device=lanes.device), -1),
        torch.where(is_sparse, shorter, length).flatten(),
        torch.where(is_sparse, own_place, places.view(length.shape)).flatten(),
    )


@triton.jit(do_not_specialize=["num_slots", "rows", "given_stride"])
def _begin_rows_kernel(
    lengths, places, page_table, num_tokens, ring_start, sparse, looks_ahead, num_verified, lanes, given, out_table,
    out_entries, out_lengths, out_places, ahead, num_slots, columns, rows, given_stride,
    ring: tl.constexpr, block_size: tl.constexpr, row_width: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program for an entry, which has row_width rows at most."""
    entry = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + entry)
    real = lane >= 0
    # All at once, and not first whether it is sparse: what takes time here is to wait for memory.
    is_sparse = tl.load(sparse + lane, mask=real, other=0) != 0
    start = tl.load(ring_start + lane, mask=real, other=0)
    tokens = tl.load(num_tokens + lane, mask=real, other=1)
    behind = tl.load(num_verified + lane, mask=real, other=0) + 1
    behind = tl.where(tl.load(looks_ahead + lane, mask=real, other=0) != 0, behind, 0)
    row = entry * rows + tl.arange(0, row_width)
    inside = tl.arange(0, row_width) < rows
    length = tl.load(lengths + row, mask=inside, other=0)
    place = tl.load(places + row, mask=inside, other=-1)
    tl.debug_barrier()  # every thread has loaded the start by then
    start = tl.where(is_sparse, start, 0)
    # Division rounds towards 0, not down; but below 0 it does not matter, as start is not.
    next_start = tl.minimum(tl.maximum((tokens - 1) // block_size - 1, start), start + 1)
    next_start = tl.where(is_sparse, next_start, 0)
    tl.store(ring_start + lane, next_start, mask=is_sparse)
    tl.store(ahead + entry, tl.where(is_sparse, tl.minimum(behind, rows - 1), rows - 1))
    tl.store(given + entry, tl.where(is_sparse, lane, -1))
    tl.store(given + given_stride + entry, start)
    tl.store(given + 2 * given_stride + entry, next_start)
    tl.store(given + 3 * given_stride + entry, tl.where(next_start > start, start, -1))
    tl.store(out_entries + entry, tl.where(real, entry, -1))

    filled = tl.minimum(start, num_slots).to(tl.int32)
    shorter = tl.maximum(length - block_size * (start - filled), 0)
    tl.store(out_lengths + row, tl.where(is_sparse, shorter, length), mask=inside)
    table = page_table + tl.maximum(lane, 0) * columns
    position = tl.maximum(length - 1, 0)
    stored = tl.where(is_sparse, place, -1) >= 0
    own = tl.load(table + num_slots + position // block_size % ring, mask=stored, other=0).to(tl.int64)
    first_turned = (start % ring).to(tl.int32)
    for first in range(0, columns, width):
        column = first + tl.arange(0, width)
        turned = num_slots + (first_turned + tl.maximum(column - filled, 0)) % ring
        seen = tl.where(is_sparse & (column >= filled), turned, column)
        page = tl.load(table + seen, mask=column < columns, other=0)
        tl.store(out_table + entry * columns + column, page, mask=column < columns)
    tl.store(out_places + row, tl.where(stored, own * block_size + position % block_size, place), mask=inside)


def begin_rows_triton(
    lengths: torch.Tensor,
    places: torch.Tensor,
    page_table: torch.Tensor,
    tables: LaneTables,
    lanes: torch.Tensor,
    given: torch.Tensor,
    num_slots: int,
    block_size: int,
) -> tuple[SparseRows, torch.Tensor]:
    (entries,), (_, columns) = lanes.shape, page_table.shape
    rows = len(lengths) // max(entries, 1)
    numbers = (torch.empty_like(like) for like in (lanes, lengths, places))
    out, ahead = SparseRows(page_table.new_empty(entries, columns), *numbers), torch.empty_like(lanes)
    tables = tables._replace(sparse=tables.sparse.view(torch.uint8), looks_ahead=tables.looks_ahead.view(torch.uint8))
    _begin_rows_kernel[(entries,)](
        lengths, places, page_table, *tables, lanes, given, *out, ahead, num_slots, columns, rows, given.stride(0),
        RING, block_size, max(triton.next_power_of_2(rows), 1), min(WIDTH, triton.next_power_of_2(columns)),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out, ahead


def sparse_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    slot_block: torch.Tensor,
    lanes: torch.Tensor,
    lengths: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    """What rows of sparse lanes attend to, by the maps and not by order: the oracle of all the above. In float32.

    q: [rows, heads, head_dim]; kv: [pages, kv_heads, 2, 16, head_dim], one layer's; page_table: [num_lanes, columns]
    int32; slot_block: [num_lanes, kv_heads, K] int32; lanes, start: [entries] int64; lengths: [rows] int64, as
    `step_inputs` gives them. Returns [rows, heads, head_dim] in q's dtype; 0 for a row that sees nothing.
    """
    num_rows, heads, head_dim = q.shape
    (entries,), (_, kv_heads, num_slots), block_size = lanes.shape, slot_block.shape, kv.shape[3]
    lane = lanes.clamp_min(0)
    pages = page_table[lane, : num_slots + RING].to(torch.int64)
    held = kv[pages].permute(3, 0, 2, 1, 4, 5).to(torch.float32)  # [2, entries, kv_heads, columns, 16, head_dim]

    # Which keys a row sees: [entries, rows of one, kv_heads, columns, 16].
    length = lengths.view(entries, -1, 1, 1, 1)
    ahead = (torch.arange(num_slots, num_slots + RING, device=q.device) - ring_column(start[:, None], num_slots)) % RING
    position = (start[:, None] + ahead)[..., None] * block_size + torch.arange(block_size, device=q.device)
    in_ring = (position[:, None, None] < length).expand(-1, -1, kv_heads, -1, -1)
    in_slot = (slot_block[lane] >= 0)[:, None, :, :, None] & (length > 0)
    seen = torch.cat((in_slot.expand(-1, in_ring.shape[1], -1, -1, block_size), in_ring), dim=3)
    seen = (seen & (lanes >= 0).view(-1, 1, 1, 1, 1)).flatten(3)

    k, v = held.flatten(3, 4).masked_fill(~seen.any(dim=1)[..., None], 0.0)
    grouped = q.to(torch.float32).view(entries, -1, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("erhgd,ehkd->erhgk", grouped, k) / math.sqrt(head_dim)
    weights = scores.masked_fill(~seen[:, :, :, None], -torch.inf).softmax(dim=-1).nan_to_num(nan=0.0)
    return torch.einsum("erhgk,ehkd->erhgd", weights, v).reshape(num_rows, heads, head_dim).to(q.dtype)
