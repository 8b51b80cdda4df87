"""Rotary position embedding in the half-split form of Hugging Face checkpoints (RoFormer, arXiv 2104.09864).

With x = [x1, x2] split in the middle of head_dim, and the angle a[i] = position * inv_freq[i]:

    out = [x1 cos a - x2 sin a, x2 cos a + x1 sin a]

The table of cos and sin is made by models.rope. Products are taken in float32 and rounded once to x's dtype.
"""

import torch


def gather_rope(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the table for some tokens, laid out for `apply_rope`; all layers share them.

    table: [num_positions, 2, head_dim / 2] float32, cos then sin; positions: [tokens] int64.
    Returns cos as [cos, cos] and sin as [-sin, sin], each [tokens, 1, head_dim] float32.
    """
    cos, sin = table[positions].chunk(2, dim=1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: from `gather_rope`. Returns x's shape and dtype."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # [x2, x1]; sin carries the sign
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
