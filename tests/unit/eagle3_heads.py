"""Tiny EAGLE-3 heads on disk, of each family that is published, and their target."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from safetensors.torch import save_file

from minserve.errors import ConfigError
from minserve.models.causal_lm import build_model
from minserve.models.config import ModelConfig, RopeConfig
from minserve.weights.eagle3 import load_eagle3
from minserve.weights.loader import init_dummy_weights

VOCAB, DRAFT_VOCAB, NUM_POSITIONS = 40, 12, 32
TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=NUM_POSITIONS,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig(),
    dtype="float32",
)
# What config.json says of a head's layers. head_dim is not hidden_size / heads, and is not what a default would be.
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
}
FAMILIES = ("EAGLE", "SpecForge", "NVIDIA ModelOpt", "speculators")
IDS = "eagle_aux_hidden_state_layer_ids"


def make_target(**changes):
    """The target with random weights."""
    fields = {name: getattr(TARGET, name) for name in TARGET.__struct_fields__}
    model = build_model(ModelConfig(**fields | changes))
    init_dummy_weights(model, device="cpu", dtype=torch.float32, seed=7)
    return model


@dataclass
class HeadOnDisk:
    """One head. parts: names of the optional parts that it has. sizes, extra: over SIZES and the rest of config.json.

    tensors: by the head's own names (midlayer is layers.0).
    """

    family: str
    parts: frozenset[str] = frozenset(("lm_head", "d2t", "t2d"))
    sizes: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    target_hidden: int = 16

    def __post_init__(self):
        self.sizes = SIZES | self.sizes
        self.tensors = self._weights() | self._vocabulary()

    def _weights(self):
        size, inner = self.sizes["hidden_size"], self.sizes["intermediate_size"]
        width = self.sizes["head_dim"]
        heads, kv_heads = self.sizes["num_attention_heads"] * width, self.sizes["num_key_value_heads"] * width
        draft_vocab = DRAFT_VOCAB if "d2t" in self.parts else VOCAB
        shapes = {"fc.weight": (size, 3 * self.target_hidden), "norm.weight": (size,)}
        for index in range(self.sizes["num_hidden_layers"]):
            read = size if index else 2 * size
            layer = {
                "input_layernorm.weight": (size,),
                "post_attention_layernorm.weight": (size,),
                "self_attn.q_proj.weight": (heads, read),
                "self_attn.k_proj.weight": (kv_heads, read),
                "self_attn.v_proj.weight": (kv_heads, read),
                "self_attn.o_proj.weight": (size, heads),
                "mlp.gate_proj.weight": (inner, size),
                "mlp.up_proj.weight": (inner, size),
                "mlp.down_proj.weight": (size, inner),
            }
            if index == 0:
                layer["hidden_norm.weight"] = (size,)
            if "qk_norm" in self.parts:
                layer |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
            biased = [("attention_bias", "self_attn.", "qkvo"), ("mlp_bias", "mlp.", ("gate", "up", "down"))]
            for part, module, projections in biased:
                for name in projections if part in self.parts else ():
                    layer[f"{module}{name}_proj.bias"] = layer[f"{module}{name}_proj.weight"][:1]
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        optional = {
            "embed_tokens": {"embed_tokens.weight": (VOCAB, size)},
            "lm_head": {"lm_head.weight": (draft_vocab, size)},
            "fc_bias": {"fc.bias": (size,)},
            "input_norm": {"input_norm.weight": (3 * self.target_hidden,)},
            "fc_norm": {f"fc_norm.{i}.weight": (self.target_hidden,) for i in range(3)},
        }
        for part in sorted(self.parts & optional.keys()):
            shapes |= optional[part]
        generator = torch.Generator().manual_seed(len(shapes))
        return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}

    def _vocabulary(self):
        picked = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB].sort().values
        if "d2t" not in self.parts:
            picked = torch.arange(VOCAB)
        marks = torch.zeros(VOCAB, dtype=torch.bool)
        marks[picked] = True
        known = {"d2t": picked - torch.arange(len(picked)), "t2d": marks}
        return {name: tensor for name, tensor in known.items() if name in self.parts}

    def config(self):
        vocabulary = {"draft_vocab_size": DRAFT_VOCAB} if "d2t" in self.parts else {}
        match self.family:
            case "EAGLE":
                old = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4}
                return old | self.sizes | vocabulary | self.extra
            case "SpecForge":
                new = {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 500.0}
                return new | self.sizes | vocabulary | self.extra
            case "NVIDIA ModelOpt":
                eagle = {"eagle_config": {"use_aux_hidden_state": True, "use_last_layernorm": True, IDS: [1, 3, 6]}}
                return {"architectures": ["LlamaForCausalLMEagle3"]} | eagle | self.sizes | vocabulary | self.extra
            case "speculators":
                kind = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], IDS: [1, 4, 8]}
                qwen3 = {"model_type": "qwen3" if "qk_norm" in self.parts else "llama"}
                layer = self.sizes | qwen3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
                return kind | {"transformer_layer_config": layer} | vocabulary | self.extra
        raise AssertionError(self.family)

    def stored(self):
        """The tensors by the names that the family's files have."""
        prefix = "midlayer." if self.family in ("EAGLE", "SpecForge") else "layers.0."
        return {name.replace("layers.0.", prefix): tensor for name, tensor in self.tensors.items()}

    def write(self, folder):
        (folder / "config.json").write_text(json.dumps(self.config()))
        if self.family == "EAGLE":
            torch.save(self.stored(), folder / "pytorch_model.bin")
        else:
            save_file(self.stored(), folder / "model.safetensors")
        return self


def load(folder, target=TARGET, dtype=torch.float32):
    return load_eagle3(folder, target, device="cpu", dtype=dtype)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write(folder, family="SpecForge", parts=("lm_head", "d2t", "t2d"), *, tensors=None, without=(), **changes):
    """A head with other tensors, without some, or with other fields of its config.json."""
    head = HeadOnDisk(family, frozenset(parts))
    head.tensors = {name: t for name, t in (head.tensors | (tensors or {})).items() if name not in without}
    head.write(folder)
    change_config(folder, **changes)
    return head


def assert_refused(folder, *words, error=ConfigError, target=TARGET):
    with pytest.raises(error) as caught:
        load(folder, target)
    for word in words:
        assert word in str(caught.value)
