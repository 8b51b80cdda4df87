"""Write new keys and values into pages.

kv[page(t), h, 0, slot(t)] = k[t, h]        kv[page(t), h, 1, slot(t)] = v[t, h]
"""

import torch


def kv_write(kv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Torch reference. No two tokens may name the same place.

    kv: [pages, kv_heads, 2, 16, head_dim], one layer's; pages, slots: [tokens] int64;
    k, v: [tokens, kv_heads, head_dim].
    """
    kv[pages, :, 0, slots] = k
    kv[pages, :, 1, slots] = v
