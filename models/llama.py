"""Llama 2 and 3, SmolLM2 and their kin (LlamaForCausalLM)."""

import torch

from minserve.kernels.rope import apply_rope
from minserve.models.causal_lm import CausalLM
from minserve.models.config import ModelConfig
from minserve.models.layers import Rope, SelfAttention


class LlamaAttention(SelfAttention):
    """RoPE on q and k."""

    def prepare(self, qkv: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # q and k lie side by side and are rotated alike: one pass turns both.
        qk, v = torch.split_with_sizes(qkv, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = torch.split_with_sizes(apply_rope(qk, *rope), [self.num_heads, self.num_kv_heads], dim=1)
        return q, k, v


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, [LlamaAttention(config, layer) for layer in range(config.num_layers)])
