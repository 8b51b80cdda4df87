"""The inputs of a step's rows, from the lanes' tables: no number of them passes through the host.

    token = last_token[lane]        position = num_tokens[lane] - 1        length = position + 1
    place = page_table[lane, position // 16] * 16 + position % 16

A step has a fixed number of entries. An entry without a row names lane -1: its token and position are 0, its length is
0 and its place -1, where nothing is stored. The same holds for a lane whose position the page table has no column for:
the row that a request gets once too often, when it has ended at the model's limit and the host does not know yet.
"""

import torch

from minserve.kernels.lang import tl, triton

WIDTH = 128
"""Entries a program."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def step_inputs(
    last_token: torch.Tensor,
    num_tokens: torch.Tensor,
    page_table: torch.Tensor,
    lanes: torch.Tensor,
    block_size: int = 16,
) -> Inputs:
    """Returns (token_ids, positions, places, lengths), [entries] int64 each.

    last_token, num_tokens: [num_lanes] int64; page_table: [num_lanes, max_blocks] int32; lanes: [entries] int64, a lane
    or -1. All contiguous.
    """
    num_lanes, _ = page_table.shape
    assert last_token.shape == num_tokens.shape == (num_lanes,), (last_token.shape, num_tokens.shape, num_lanes)
    assert last_token.dtype == num_tokens.dtype == lanes.dtype == torch.int64
    assert page_table.dtype == torch.int32, page_table.dtype
    assert lanes.dim() == 1, lanes.shape
    assert all(tensor.is_contiguous() for tensor in (last_token, num_tokens, page_table, lanes))
    run = step_inputs_triton if lanes.is_cuda else step_inputs_reference
    return run(last_token, num_tokens, page_table, lanes, block_size)


def step_inputs_reference(
    last_token: torch.Tensor, num_tokens: torch.Tensor, page_table: torch.Tensor, lanes: torch.Tensor, block_size: int
) -> Inputs:
    lane = lanes.clamp_min(0)
    position = num_tokens[lane] - 1
    real = (lanes >= 0) & (position >= 0) & (position < page_table.shape[1] * block_size)
    position = torch.where(real, position, 0)
    place = page_table[lane, position // block_size].to(torch.int64) * block_size + position % block_size
    token = torch.where(real, last_token[lane], 0)
    return token, position, torch.where(real, place, -1), torch.where(real, position + 1, 0)


@triton.jit(do_not_specialize=["num_entries"])
def _step_inputs_kernel(
    last_token,
    num_tokens,
    page_table,
    lanes,
    token_ids,
    positions,
    places,
    lengths,
    num_entries,
    max_blocks,
    block_size: tl.constexpr,
    width: tl.constexpr,
):
    entry = tl.program_id(0) * width + tl.arange(0, width)
    inside = entry < num_entries
    lane = tl.load(lanes + entry, mask=inside, other=-1)
    position = tl.load(num_tokens + lane, mask=lane >= 0, other=0) - 1
    block = position // block_size
    real = (position >= 0) & (block < max_blocks)
    token = tl.load(last_token + lane, mask=real, other=0)
    page = tl.load(page_table + lane * max_blocks + block, mask=real, other=0).to(tl.int64)
    tl.store(token_ids + entry, token, mask=inside)
    tl.store(positions + entry, tl.where(real, position, 0), mask=inside)
    tl.store(places + entry, tl.where(real, page * block_size + position % block_size, -1), mask=inside)
    tl.store(lengths + entry, tl.where(real, position + 1, 0), mask=inside)


def step_inputs_triton(
    last_token: torch.Tensor, num_tokens: torch.Tensor, page_table: torch.Tensor, lanes: torch.Tensor, block_size: int
) -> Inputs:
    # Four tensors and not rows of one: each begins where kernels that read it may take 16 bytes at once.
    token_ids, positions, places, lengths = (torch.empty_like(lanes) for _ in range(4))
    _step_inputs_kernel[(triton.cdiv(lanes.shape[0], WIDTH),)](
        last_token,
        num_tokens,
        page_table,
        lanes,
        token_ids,
        positions,
        places,
        lengths,
        lanes.shape[0],
        page_table.shape[1],
        block_size,
        WIDTH,
        num_warps=4,
    )
    return token_ids, positions, places, lengths
