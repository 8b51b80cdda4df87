"""Attention of a chunk of one sequence over itself and all that comes before it.

    out[i, h] = sum over t <= start + i of softmax_t(q[i, h] . k[t, g] / sqrt(head_dim)) v[t, g]

for the chunk's tokens i at positions start + i. Two ways to it:

`masked_attention` is torch's, with a mask. It takes any shape and dtype.

`flash_attention` is cuDNN's on CUDA, in bfloat16 and float16: 620 to 700 TFLOP/s on an H200, twice what torch's own
flash kernels reach. It is plainly causal or not masked at all, and gives the log-sum-exp of each row's scores with its
output, so that pieces over different keys can be merged (`merge_attention`). cuDNN plans each new shape for 0.06 to
0.4 seconds: give it few.
"""

import math

import torch
import torch.nn.functional as F


def chunk_mask(start: int, num_tokens: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
    """[num_tokens, num_keys] bool: which keys each token of the chunk sees; None where plain causal attention does."""
    if start == 0 and num_keys == num_tokens:
        return None
    last = torch.arange(start, start + num_tokens, device=device)
    return torch.arange(num_keys, device=device)[None, :] <= last[:, None]


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """q: [tokens, heads, head_dim]; k, v: [kv_heads, keys, head_dim], the earlier tokens' first; mask: from chunk_mask.

    Returns q's shape.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [tokens, heads, head_dim]; k, v: [kv_heads, keys, head_dim], contiguous. causal: row i sees keys 0 to i.

    Returns the output in q's shape, perhaps strided, and the natural log-sum-exp [heads, tokens] float32.
    """
    if not q.is_cuda:
        return flash_attention_reference(q, k, v, causal=causal)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1)[None], k[None], v[None], None, True, 0.0, causal, False
    )
    return out[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0])


def flash_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference, by the formula."""
    num_tokens, heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    grouped = (
        q.float().transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    )  # a KV head's query heads, one after another
    scores = (grouped @ k.float().mT / math.sqrt(head_dim)).view(heads, num_tokens, num_keys)
    if causal:
        outside = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(outside, -torch.inf)
    weights = scores.softmax(dim=-1).view(num_kv_heads, -1, num_keys)
    out = (weights @ v.float()).view(heads, num_tokens, head_dim)
    return out.transpose(0, 1).to(q.dtype), scores.logsumexp(dim=-1)
