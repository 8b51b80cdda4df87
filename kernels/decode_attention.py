"""Attention of decode rows over pages.

    out[r, h] = sum over t < lengths[r] of softmax_t(q[r, h] . k[t, g] / sqrt(head_dim)) v[t, g]

where g = h // (heads / kv_heads), and t runs over the tokens of the row's sequence, in pages named by its page table.
RoPE is in the keys already.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minserve.kernels.gather_pages import gather_pages, page_rows


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """What all layers of a step share. rows: from page_rows; mask: [rows, 1, 1, blocks * 16] bool."""

    rows: torch.Tensor
    mask: torch.Tensor


def decode_index(page_table: torch.Tensor, lengths: torch.Tensor, kv_heads: int, block_size: int) -> DecodeIndex:
    """page_table: [rows, blocks] int, any page where a row has fewer blocks; lengths: [rows] int64."""
    positions = torch.arange(page_table.shape[1] * block_size, device=page_table.device)
    mask = positions[None, None, None, :] < lengths[:, None, None, None]
    return DecodeIndex(page_rows(page_table, kv_heads), mask)


def decode_attention(q: torch.Tensor, kv: torch.Tensor, index: DecodeIndex) -> torch.Tensor:
    """Torch reference. q: [rows, heads, head_dim]; kv: [pages, kv_heads, 2, 16, head_dim]. Returns q's shape."""
    num_rows, heads, head_dim = q.shape
    k, v = gather_pages(kv, index.rows, num_rows)
    # The query heads of one KV head are rows of one product, so K and V are read once for all of them.
    grouped = q.view(num_rows, k.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=index.mask).reshape(num_rows, heads, head_dim)
