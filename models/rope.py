"""The table of cos and sin that rotary position embedding looks up.

Owns: the frequencies of each kind of RoPE scaling, computed as transformers computes them.
Does not know: how they are applied (kernels.rope).
"""

import math

import torch

from minserve.models.config import RopeConfig, yarn_attention_factor


def make_rope_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[num_positions, 2, head_dim / 2] float32: cos and sin of every angle, with YaRN's attention factor in them.

    Computed on the CPU whatever the device, so that all devices hold the same values.
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
    attention_factor = 1.0
    match rope.kind:
        case "default":
            pass
        case "linear":
            inv_freq = inv_freq / rope.factor
        case "llama3":
            inv_freq = _llama3(inv_freq, rope)
        case "yarn":
            inv_freq = _yarn(inv_freq, rope, head_dim)
            attention_factor = rope.attention_factor or yarn_attention_factor(rope.factor)
    angles = torch.arange(num_positions, dtype=torch.float32, device="cpu")[:, None] * inv_freq
    return torch.stack((angles.cos(), angles.sin()), dim=1).mul_(attention_factor).to(device)


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1's rule)."""
    assert rope.original_max_position_embeddings is not None
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # full turns over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """As llama3, but the blend is linear in the dimension's index (arXiv 2309.00071, section 3.2)."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def dimension(num_turns: float) -> float:
        """Where in the head a pair makes so many full turns over the original context."""
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / rope.factor * stretched + inv_freq * (1.0 - stretched)
