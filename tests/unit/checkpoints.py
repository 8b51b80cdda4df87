"""Small checkpoints on disk, for the tests of the loader."""

import json

import torch
from safetensors.torch import save_file

from minserve.models.causal_lm import build_model
from minserve.models.config import ModelConfig, RopeConfig
from minserve.weights.loader import load_weights

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=32,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    qk_norm=True,
    rope=RopeConfig(),
    dtype="float32",
)
LAYER_SHAPES = {
    "input_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "self_attn.q_norm.weight": (4,),
    "self_attn.k_norm.weight": (4,),
    "post_attention_layernorm.weight": (8,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}


def random_tensors():
    """A whole checkpoint of CONFIG."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def load(folder, config=CONFIG, dtype=torch.float32, progress=None):
    model = build_model(config)
    num_bytes = load_weights(model, folder, device="cpu", dtype=dtype, progress=progress)
    return model, num_bytes


def save(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def save_sharded(folder, *shards, weight_map=None):
    named = {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}
    for name, shard in named.items():
        save_file(shard, folder / name)
    if weight_map is None:
        weight_map = {tensor: name for name, shard in named.items() for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def halves(tensors):
    names = sorted(tensors)
    return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}
