"""The metadata of a GGUF file, as the config.json that Hugging Face would have written.

Owns: the supported architectures and what each key means for them. Does not know: tensors' bytes, or text.
"""

import math
from typing import Any

import numpy as np

from minserve.errors import ConfigError, WeightsError
from minserve.weights.gguf_reader import GGUFFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Each of these changes what the model computes, in ways that the two architectures do not have.
_REFUSED_IF_SET = ("expert_count", "logit_scale", "embedding_scale", "residual_scale", "attention.scale")

# llama3 RoPE comes as a tensor of factors, from which only the largest can be read directly; the other three settings
# are the same in every published model.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL_LENGTH = 1.0, 4.0, 8192


def read_config(file: GGUFFile) -> dict[str, Any]:
    """config.json, but for dtype and token ids. Raises ConfigError for a model that is not supported."""
    arch = file.require("general.architecture", str)
    if arch not in _ARCHITECTURES:
        allowed = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{file.path}: general.architecture is {arch!r}; supported are {allowed}")
    for name in _REFUSED_IF_SET:
        if file.metadata.get(f"{arch}.{name}"):
            raise ConfigError(
                f"{file.path}: {arch}.{name} is {file.metadata[f'{arch}.{name}']!r}, which is not supported"
            )
    hidden_size = _positive(file, f"{arch}.embedding_length")
    num_heads = _positive(file, f"{arch}.attention.head_count")
    head_dim = _positive(file, f"{arch}.attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        value = _positive(file, f"{arch}.{name}", head_dim)
        if value != head_dim:
            raise ConfigError(
                f"{file.path}: {arch}.{name} is {value}; only the head dimension, {head_dim}, is supported"
            )
    if head_dim % 2:
        raise WeightsError(f"{file.path}: the head dimension is {head_dim}, which is odd")
    config = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _positive(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _positive(file, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _positive(file, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _positive(file, f"{arch}.context_length"),
        "rms_norm_eps": _positive_float(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file, arch, head_dim),
        "vocab_size": _embedding_rows(file, hidden_size),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return config


def _embedding_rows(file: GGUFFile, hidden_size: int) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        found = "nothing" if embedding is None else embedding.shape
        raise WeightsError(f"{file.path}: token_embd.weight must have the shape [tokens, {hidden_size}], found {found}")
    return embedding.shape[0]


def _rope_parameters(file: GGUFFile, arch: str, head_dim: int) -> dict[str, Any]:
    theta = _positive_float(file, f"{arch}.rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise ConfigError(f"{file.path}: rope_freqs.weight together with {arch}.rope.scaling.type {kind!r}")
        return rope | _llama3_scaling(file, theta, head_dim)
    if kind == "none":
        # The older spelling of linear scaling has no type.
        factor = _positive_float(file, f"{arch}.rope.scale_linear", 1.0)
        return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}
    factor = _positive_float(file, f"{arch}.rope.scaling.factor")
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"{file.path}: {arch}.rope.scaling.type is {kind!r}; supported are none, linear, yarn")
    attention_factor = _positive_float(file, f"{arch}.rope.scaling.attn_factor", 1.0)
    return rope | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _positive(file, f"{arch}.rope.scaling.original_context_length"),
        "beta_fast": _positive_float(file, f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": _positive_float(file, f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        # GGUF's is a factor on top of YaRN's own, Hugging Face's replaces it.
        "attention_factor": attention_factor * (0.1 * math.log(factor) + 1.0),
    }


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings that yield the stored factors [head_dim / 2] by which each frequency is divided."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,) or tensor.quantization.name != "F32":
        raise WeightsError(f"{file.path}: rope_freqs.weight must be {head_dim // 2} float32 values, is {tensor.shape}")
    stored = tensor.rows.view(np.float32).reshape(-1)
    # Rounded, for converters that computed it in float32.
    factor = round(float(stored.max()), 4)
    if not 1 <= factor < math.inf:
        raise WeightsError(f"{file.path}: rope_freqs.weight holds factors up to {factor}")
    low, high, original = _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL_LENGTH
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # 0 for wavelengths that are stretched in full, 1 for those that stay, a ramp of the frequency between.
    kept = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - kept) / factor + kept)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise ConfigError(f"{file.path}: rope_freqs.weight holds other factors than those of llama3 scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.require(key, int) if default is None else file.get(key, int, default)
    if value <= 0:
        raise WeightsError(f"{file.path}: {key} must be positive, is {value}")
    return value


def _positive_float(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.require(key, float) if default is None else file.get(key, float, default)
    if not (math.isfinite(value) and value > 0):
        raise WeightsError(f"{file.path}: {key} must be positive and finite, is {value}")
    return value
