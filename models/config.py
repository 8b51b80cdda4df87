"""The shape of a model, read from its config.json. Imports no torch.

Owns: which fields of a Hugging Face config matter and what each spelling of them means.
Does not know: weights, devices, or how the model is computed.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: the base and, for models stretched beyond it, how.

    kind "llama3": factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
    kind "yarn": factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor (None: 0.1 ln(f) + 1).
    kind "linear": factor.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only transformer.

    architecture: "LlamaForCausalLM" or "Qwen3ForCausalLM". dtype: the checkpoint's, as a torch name ("bfloat16").
    qk_norm: RMSNorm on each head of q and k before RoPE (Qwen3).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str

    @classmethod
    def from_folder(cls, folder: Path, rope_scaling: dict[str, Any] | None = None) -> "ModelConfig":
        """Read folder/config.json; rope_scaling replaces what it says of RoPE. Raises ConfigError, naming the field."""
        raise NotImplementedError
