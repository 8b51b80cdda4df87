"""Causal attention of a chunk of one sequence over itself and all that comes before it.

    out[i, h] = sum over t <= start + i of softmax_t(q[i, h] . k[t, g] / sqrt(head_dim)) v[t, g]

for the chunk's tokens i at positions start + i.
"""

import torch
import torch.nn.functional as F


def chunk_mask(start: int, num_tokens: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
    """[num_tokens, num_keys] bool: which keys each token of the chunk sees; None where plain causal attention does."""
    if start == 0 and num_keys == num_tokens:
        return None
    last = torch.arange(start, start + num_tokens, device=device)
    return torch.arange(num_keys, device=device)[None, :] <= last[:, None]


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Torch reference. q: [tokens, heads, head_dim]; k, v: [kv_heads, keys, head_dim], the earlier tokens' first.

    mask: from chunk_mask. Returns q's shape.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)
