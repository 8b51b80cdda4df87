"""Copy the pages of sequences side by side, for attention that reads plain tensors.

`gather_keys` is for prefill: one sequence, into tensors of any number of keys. `gather_pages` is for torch references
alone: a real decode kernel reads pages where they are.
"""

import torch

from minserve.kernels.lang import tl, triton


def page_rows(page_table: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Where each (K or V, sequence, head, block) begins in one layer's kv seen as rows of 16 x head_dim.

    page_table: [seqs, blocks] int. Returns [2 * seqs * kv_heads * blocks] int64; the same for every layer.
    """
    pages = page_table.to(torch.int64)[None, :, None, :]
    heads = torch.arange(kv_heads, device=page_table.device)[None, None, :, None]
    sides = torch.arange(2, device=page_table.device)[:, None, None, None]
    return ((pages * kv_heads + heads) * 2 + sides).reshape(-1)


def gather_pages(kv: torch.Tensor, rows: torch.Tensor, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the sequences that `rows` (from page_rows) was made of: [seqs, kv_heads, blocks * 16, head_dim] each.

    kv: [pages, kv_heads, 2, 16, head_dim], contiguous.
    """
    num_pages, kv_heads, _, block_size, head_dim = kv.shape
    flat = kv.view(num_pages * kv_heads * 2, block_size * head_dim)
    both = flat.index_select(0, rows).view(2, num_seqs, kv_heads, -1, head_dim)
    return both[0], both[1]


def gather_keys(
    kv: torch.Tensor, page_row: torch.Tensor, first: int, k_out: torch.Tensor, v_out: torch.Tensor, valid: int
) -> None:
    """Copy K and V of a sequence's tokens from block `first` on: as many as the outputs take.

    kv: [pages, kv_heads, 2, 16, head_dim], one layer's, contiguous
    page_row: [max_blocks] int32, the sequence's row of the page table
    k_out, v_out: [kv_heads, num_keys, head_dim], contiguous, kv's dtype; all of both is written
    valid: how many of the num_keys the sequence has. The rest become zeros, and no page is looked up for them.
    """
    _, kv_heads, _, block_size, head_dim = kv.shape
    num_keys = k_out.shape[1]
    assert k_out.shape == v_out.shape == (kv_heads, num_keys, head_dim), (k_out.shape, v_out.shape, kv.shape)
    assert kv.dtype == k_out.dtype == v_out.dtype, (kv.dtype, k_out.dtype, v_out.dtype)
    assert (page_row.dim(), page_row.dtype) == (1, torch.int32), (page_row.shape, page_row.dtype)
    assert all(tensor.is_contiguous() for tensor in (kv, page_row, k_out, v_out))
    assert 0 <= valid <= num_keys, (valid, num_keys)
    assert 0 <= first <= page_row.shape[0] - -(-valid // block_size), (first, valid, page_row.shape)
    run = gather_keys_triton if kv.is_cuda else gather_keys_reference
    run(kv, page_row, first, k_out, v_out, valid)


def gather_keys_reference(
    kv: torch.Tensor, page_row: torch.Tensor, first: int, k_out: torch.Tensor, v_out: torch.Tensor, valid: int
) -> None:
    num_blocks = -(-valid // kv.shape[3])
    rows = page_rows(page_row[None, first : first + num_blocks], kv.shape[1])
    for out, side in zip((k_out, v_out), gather_pages(kv, rows, 1), strict=True):
        out[:, :valid] = side[0, :, :valid]
        out[:, valid:] = 0


@triton.jit(do_not_specialize=["first", "valid", "num_keys"])
def _gather_keys_kernel(
    kv,
    page_row,
    k_out,
    v_out,
    first,
    valid,
    num_keys,
    kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
):
    """One program for one block of one head; width: head_dim, rounded up to a power of two."""
    block = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    slot = tl.arange(0, block_size)
    column = tl.arange(0, width)
    key = block * block_size + slot
    page = tl.load(page_row + first + block, mask=block * block_size < valid, other=0).to(tl.int64)
    source = kv + (page * kv_heads + head) * (2 * block_size * head_dim) + slot[:, None] * head_dim + column[None, :]
    in_head = (column < head_dim)[None, :]
    known = (key < valid)[:, None] & in_head
    k = tl.load(source, mask=known, other=0.0)
    v = tl.load(source + block_size * head_dim, mask=known, other=0.0)
    target = (head.to(tl.int64) * num_keys + key)[:, None] * head_dim + column[None, :]
    inside = (key < num_keys)[:, None] & in_head
    tl.store(k_out + target, k, mask=inside)
    tl.store(v_out + target, v, mask=inside)


def gather_keys_triton(
    kv: torch.Tensor, page_row: torch.Tensor, first: int, k_out: torch.Tensor, v_out: torch.Tensor, valid: int
) -> None:
    _, kv_heads, _, block_size, head_dim = kv.shape
    num_keys = k_out.shape[1]
    _gather_keys_kernel[(triton.cdiv(num_keys, block_size) * kv_heads,)](
        kv,
        page_row,
        k_out,
        v_out,
        first,
        valid,
        num_keys,
        kv_heads,
        block_size,
        head_dim,
        triton.next_power_of_2(head_dim),
        num_warps=4,
    )
