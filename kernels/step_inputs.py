"""The inputs of a step's rows, from the lanes' tables: no number of them passes through the host.

A step has a fixed number of entries, and each has R rows: its lane's last token, and R - 1 drafts of those after it.

    row j: token = last_token[lane] if j == 0 else drafts[lane, j - 1]
           position = num_tokens[lane] - 1 + j           length = position + 1
           place = page_table[lane, position // 16] * 16 + position % 16

An entry without a lane names lane -1: its tokens and positions are 0, its lengths are 0 and its places -1, where
nothing is stored. The same holds for a position that the page table has no column for.

A row's token stands at its position, and what it yields one further. So a row behind end[lane] - 2 yields nothing of
use: too many drafts, or the row that a request gets once too often, when it has ended and the host does not know yet.
It has no place, and attends as if it stood at end[lane] - 2, which is within the lane's own blocks.
"""

import torch

from minserve.kernels.lang import tl, triton

WIDTH = 128
"""Rows a program."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def step_inputs(
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    num_tokens: torch.Tensor,
    end: torch.Tensor,
    page_table: torch.Tensor,
    lanes: torch.Tensor,
    num_drafts: int,
    block_size: int = 16,
) -> Inputs:
    """Returns (token_ids, positions, places, lengths), [entries * (1 + num_drafts)] int64 each.

    last_token, num_tokens, end: [num_lanes] int64, end: no token of the lane ever stands there or behind;
    drafts: [num_lanes, max_drafts] int64, -1 where there is none, which gives token 0;
    page_table: [num_lanes, max_blocks] int32; lanes: [entries] int64, a lane or -1. All contiguous.
    """
    num_lanes, _ = page_table.shape
    for table in (last_token, num_tokens, end):
        assert table.shape == (num_lanes,), (table.shape, num_lanes)
    assert drafts.dim() == 2, drafts.shape
    assert len(drafts) == num_lanes, (drafts.shape, num_lanes)
    assert 0 <= num_drafts <= drafts.shape[1], (num_drafts, drafts.shape)
    assert all(table.dtype == torch.int64 for table in (last_token, drafts, num_tokens, end, lanes))
    assert page_table.dtype == torch.int32, page_table.dtype
    assert lanes.dim() == 1, lanes.shape
    assert all(table.is_contiguous() for table in (last_token, drafts, num_tokens, end, page_table, lanes))
    run = step_inputs_triton if lanes.is_cuda else step_inputs_reference
    return run(last_token, drafts, num_tokens, end, page_table, lanes, num_drafts, block_size)


def step_inputs_reference(
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    num_tokens: torch.Tensor,
    end: torch.Tensor,
    page_table: torch.Tensor,
    lanes: torch.Tensor,
    num_drafts: int,
    block_size: int,
) -> Inputs:
    lane = lanes.clamp_min(0)
    first = num_tokens[lane, None] - 1
    wanted = first + torch.arange(1 + num_drafts, device=lanes.device)
    position = wanted.minimum(end[lane, None] - 2)
    real = (lanes >= 0)[:, None] & (first >= 0) & (position >= 0) & (position < page_table.shape[1] * block_size)
    stored = real & (position == wanted)
    position = torch.where(real, position, 0)
    place = page_table[lane[:, None], position // block_size].to(torch.int64) * block_size + position % block_size
    tokens = torch.cat((last_token[lane, None], drafts[lane, :num_drafts].clamp_min(0)), dim=1)
    rows = (torch.where(real, tokens, 0), position, torch.where(stored, place, -1), torch.where(real, position + 1, 0))
    token_ids, positions, places, lengths = (each.flatten() for each in rows)
    return token_ids, positions, places, lengths


@triton.jit(do_not_specialize=["num_rows", "rows_per_entry"])
def _step_inputs_kernel(
    last_token,
    drafts,
    num_tokens,
    end,
    page_table,
    lanes,
    token_ids,
    positions,
    places,
    lengths,
    num_rows,
    rows_per_entry,
    max_drafts,
    max_blocks,
    block_size: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0) * width + tl.arange(0, width)
    inside = row < num_rows
    entry = row // rows_per_entry
    ahead = row - entry * rows_per_entry
    lane = tl.load(lanes + entry, mask=inside, other=-1)
    first = tl.load(num_tokens + lane, mask=lane >= 0, other=0) - 1
    last = tl.load(end + lane, mask=lane >= 0, other=0) - 2
    position = tl.minimum(first + ahead, last)
    block = position // block_size
    real = (first >= 0) & (position >= 0) & (block < max_blocks)
    token = tl.load(last_token + lane, mask=real & (ahead == 0), other=0)
    draft = tl.load(drafts + lane * max_drafts + ahead - 1, mask=real & (ahead > 0), other=0)
    page = tl.load(page_table + lane * max_blocks + block, mask=real, other=0).to(tl.int64)
    place = page * block_size + position % block_size
    tl.store(token_ids + row, tl.where(ahead == 0, token, tl.maximum(draft, 0)), mask=inside)
    tl.store(positions + row, tl.where(real, position, 0), mask=inside)
    tl.store(places + row, tl.where(real & (first + ahead <= last), place, -1), mask=inside)
    tl.store(lengths + row, tl.where(real, position + 1, 0), mask=inside)


def step_inputs_triton(
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    num_tokens: torch.Tensor,
    end: torch.Tensor,
    page_table: torch.Tensor,
    lanes: torch.Tensor,
    num_drafts: int,
    block_size: int,
) -> Inputs:
    num_rows = len(lanes) * (1 + num_drafts)
    # Four tensors and not rows of one: each begins where kernels that read it may take 16 bytes at once.
    token_ids, positions, places, lengths = (lanes.new_empty(num_rows) for _ in range(4))
    _step_inputs_kernel[(triton.cdiv(num_rows, WIDTH),)](
        last_token,
        drafts,
        num_tokens,
        end,
        page_table,
        lanes,
        token_ids,
        positions,
        places,
        lengths,
        num_rows,
        1 + num_drafts,
        drafts.shape[1],
        page_table.shape[1],
        block_size,
        WIDTH,
        num_warps=4,
    )
    return token_ids, positions, places, lengths
