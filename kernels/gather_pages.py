"""Copy the pages of some sequences side by side, so that plain attention can read them.

For the torch references only: a real kernel reads pages where they are.
"""

import torch


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
