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
    """What all layers of a step share. rows: from page_rows; num_keys: how many keys are looked at.

    mask: [rows, 1, 1, num_keys], what is added to scores: 0, or -inf past a row's end; None if no row ends before.
    """

    rows: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


def decode_index(page_table: torch.Tensor, lengths: torch.Tensor, num_keys: int, kv: torch.Tensor) -> DecodeIndex:
    """page_table: [rows, blocks] int, any page where a row has fewer blocks; lengths: [rows] int64, the longest of them
    num_keys; kv: the pages of any layer."""
    rows = page_rows(page_table, kv.shape[1])
    if page_table.shape[0] == 1 and kv.device.type == "cpu":
        return DecodeIndex(rows, num_keys, None)
    # Whole blocks elsewhere: on CUDA a new number of keys may be a new plan of cuDNN's, for 0.4 s.
    num_keys = page_table.shape[1] * kv.shape[3]
    outside = torch.arange(num_keys, device=kv.device)[None, :] >= lengths[:, None]
    mask = torch.zeros(outside.shape, dtype=kv.dtype, device=kv.device).masked_fill(outside, -torch.inf)
    return DecodeIndex(rows, num_keys, mask[:, None, None, :])


def decode_attention(q: torch.Tensor, kv: torch.Tensor, index: DecodeIndex) -> torch.Tensor:
    """Torch reference. q: [rows, heads, head_dim]; kv: [pages, kv_heads, 2, 16, head_dim]. Returns q's shape."""
    num_rows, heads, head_dim = q.shape
    k, v = gather_pages(kv, index.rows, num_rows)
    k, v = k[:, :, : index.num_keys], v[:, :, : index.num_keys]
    # The query heads of one KV head are rows of one product, so K and V are read once for all of them.
    grouped = q.view(num_rows, k.shape[1], -1, head_dim)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=index.mask).reshape(num_rows, heads, head_dim)
