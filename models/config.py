"""The shape of a model, read from its config.json. Imports no torch.

Owns: which fields of a Hugging Face config matter and what each spelling of them means.
Does not know: weights, devices, or how the model is computed.

Whatever would change the model's output and is not supported is refused by name; other fields are not looked at.
"""

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from minserve.errors import ConfigError
from minserve.folder import read_json_object
from minserve.models.fields import Fields
from minserve.models.quantization import Fp8Checkpoint, read_quantization

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")

# Far above any real model, and low enough that no product of them overflows.
MAX_LAYERS = 1024
MAX_SIZE = 2**20
MAX_VOCAB_SIZE = 2**24
MAX_ROPE_FACTOR = 4096.0
MIN_ROPE_THETA = 2.0

_ROPE_FIELDS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
        *("low_freq_factor", "high_freq_factor"),
        *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    )
)


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: the base and, for models stretched beyond it, how.

    kind "llama3": factor, low_freq_factor, high_freq_factor, original_max_position_embeddings.
    kind "yarn": factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor (None: 0.1 ln(f) + 1),
        truncate (the ramp between the two frequencies starts and ends at whole dimensions).
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
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only transformer.

    architecture: "LlamaForCausalLM" or "Qwen3ForCausalLM". dtype: the checkpoint's, as a torch name ("bfloat16").
    max_position_embeddings: the longest context, RoPE scaling included.
    qk_norm: RMSNorm on each head of q and k before RoPE (Qwen3).
    quantization: how the checkpoint stores projections in 8 bits; None: it does not.
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
    quantization: Fp8Checkpoint | None = None

    @classmethod
    def from_folder(cls, folder: Path, rope_scaling: dict[str, Any] | None = None) -> "ModelConfig":
        """Read folder/config.json; rope_scaling replaces what it says of RoPE. Raises ConfigError, naming the field.

        rope_scaling may leave out rope_theta, which then stays the file's.
        """
        fields = Fields(read_json_object(folder, "config.json"), str(folder / "config.json"))
        architecture = _architecture(fields)
        num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
        refuse_unsupported(fields)
        _refuse_sliding_window(fields, num_layers)
        hidden_size = fields.integer("hidden_size", maximum=MAX_SIZE)
        num_heads = fields.integer("num_attention_heads", maximum=MAX_SIZE)
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
        rope, max_position_embeddings = read_rope(fields, rope_scaling)
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", maximum=MAX_SIZE),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=read_head_dim(fields, architecture, hidden_size, num_heads),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            rope=rope,
            dtype=_dtype(fields),
            quantization=read_quantization(fields),
        )


def _architecture(fields: Fields) -> str:
    named = fields.any("architectures")
    if isinstance(named, list) and len(named) == 1 and named[0] in ARCHITECTURES:
        return str(named[0])
    no_code = " (code that comes with a model is never run)" if fields.has("auto_map") else ""
    raise fields.error("architectures", "a list of one of " + ", ".join(ARCHITECTURES) + no_code)


def refuse_unsupported(fields: Fields) -> None:
    """Refuse what would change the output of any layer. Raises ConfigError, naming the field."""
    fields.choice("hidden_act", ("silu",), "silu")
    if fields.boolean("rope_interleaved", False):
        raise fields.error("rope_interleaved", "false")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "1")


def _refuse_sliding_window(fields: Fields, num_layers: int) -> None:
    layer_types = fields.any("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise fields.error("layer_types", 'a list of "full_attention" only')
    elif fields.boolean("use_sliding_window", False) and fields.has("sliding_window"):
        # Qwen3's rule: layers from max_window_layers on slide, unless layer_types says otherwise.
        first_sliding_layer = fields.any("max_window_layers")
        if not isinstance(first_sliding_layer, int) or first_sliding_layer < num_layers:
            raise fields.error("use_sliding_window", "false: sliding-window attention is not supported")


def read_head_dim(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    """The size of a head of attention. Raises ConfigError, naming the field."""
    if not fields.has("head_dim"):
        if architecture == "Qwen3ForCausalLM":
            return 128  # what Qwen3's configuration means by silence
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}, or head_dim be given")
    head_dim = fields.integer("head_dim", hidden_size // num_heads, maximum=MAX_SIZE)
    if head_dim % 2:
        raise ConfigError(f"{fields.source}: head_dim is {head_dim}; it must be even, for RoPE turns pairs")
    return head_dim


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.any(name)
    if isinstance(value, str):
        fields = Fields({name: value.removeprefix("torch.")}, fields.source)
    return fields.choice(name, DTYPES, "float32")


def read_rope(fields: Fields, override: dict[str, Any] | None = None) -> tuple[RopeConfig, int]:
    """The RoPE and the longest context that it allows.

    transformers 5 writes one object, rope_parameters, with rope_theta inside; older files have rope_theta beside
    rope_scaling, whose kind is called type or rope_type.
    """
    written = _rope_object(fields)
    theta = fields.number("rope_theta", 10000.0, minimum=MIN_ROPE_THETA)
    theta = written.number("rope_theta", theta, minimum=MIN_ROPE_THETA)
    scaling = written
    if override is not None:
        scaling = Fields(override, "--rope-scaling")
        if unknown := scaling.names() - _ROPE_FIELDS:
            raise ConfigError(f"--rope-scaling: {min(unknown)} is unknown; known are {', '.join(sorted(_ROPE_FIELDS))}")
        theta = scaling.number("rope_theta", theta, minimum=MIN_ROPE_THETA)
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.error("partial_rotary_factor", "1")
    kind_name = "rope_type" if scaling.has("rope_type") or not scaling.has("type") else "type"
    kind = scaling.choice(kind_name, ROPE_KINDS, None if override is not None else "default")

    max_positions = fields.integer("max_position_embeddings", 2048)
    if kind == "default":
        return RopeConfig(theta=theta), max_positions
    factor = scaling.number("factor", minimum=1.0, maximum=MAX_ROPE_FACTOR)
    if kind == "linear":
        # A file's length counts its own scaling; one from the command line comes on top.
        longest = max_positions if override is None else int(max_positions * factor)
        return RopeConfig(theta=theta, kind="linear", factor=factor), longest
    original = scaling.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "llama3":
        return _llama3(scaling, theta, factor, original), max_positions
    return _yarn(scaling, theta, factor, original), int(original * factor)


def _rope_object(fields: Fields) -> Fields:
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    value = fields.any(name)
    if value is None:
        return Fields({}, fields.source)
    if not isinstance(value, dict) or any(isinstance(part, dict) for part in value.values()):
        raise fields.error(name, "an object that holds for all layers")
    return Fields(value, f"{fields.source}: {name}")


def _llama3(scaling: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    low, high = scaling.number("low_freq_factor", 1.0), scaling.number("high_freq_factor", 4.0)
    if high <= low:
        raise scaling.error("high_freq_factor", f"above low_freq_factor, {low:g}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    attention_factor = None
    if scaling.has("attention_factor"):
        attention_factor = scaling.number("attention_factor")
    elif scaling.any("mscale") and scaling.any("mscale_all_dim"):
        # DeepSeek's spelling; either of them 0 or absent means the paper's factor.
        mscale, mscale_all_dim = scaling.number("mscale"), scaling.number("mscale_all_dim")
        attention_factor = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    beta_fast, beta_slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise scaling.error("beta_fast", f"at least beta_slow, {beta_slow:g}")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
        truncate=scaling.boolean("truncate", True),
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN scales cos and sin, which keeps the entropy of attention at length (arXiv 2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
