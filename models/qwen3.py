"""Qwen3, dense (Qwen3ForCausalLM)."""

import torch

from minserve.kernels.rope import apply_rope
from minserve.models.causal_lm import CausalLM
from minserve.models.config import ModelConfig
from minserve.models.layers import RMSNorm, Rope, SelfAttention


class Qwen3Attention(SelfAttention):
    """RMSNorm on each head of q and k, then RoPE."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def prepare(self, qkv: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = torch.split_with_sizes(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return apply_rope(self.q_norm(q), *rope), apply_rope(self.k_norm(k), *rope), v


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig) -> None:
        assert config.qk_norm
        super().__init__(config, [Qwen3Attention(config, layer) for layer in range(config.num_layers)])
