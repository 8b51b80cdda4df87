"""Small checkpoints with projections in 8 bits, and what they were made of."""

import json

import torch

from minserve.kernels.fp8 import FP8
from minserve.models.causal_lm import build_model
from minserve.models.config import ModelConfig
from minserve.weights.loader import load_weights

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "torch_dtype": "float32",
}
PROJECTIONS = {
    "self_attn.q_proj": (32, 48),
    "self_attn.k_proj": (16, 48),
    "self_attn.v_proj": (16, 48),
    "self_attn.o_proj": (48, 32),
    "mlp.gate_proj": (80, 48),
    "mlp.up_proj": (80, 48),
    "mlp.down_proj": (48, 80),
}
NORMS = {
    "input_layernorm": 48,
    "post_attention_layernorm": 48,
    "self_attn.q_norm": 16,
    "self_attn.k_norm": 16,
}
NAMES = [f"model.layers.{layer}.{name}" for layer in range(2) for name in PROJECTIONS]
BLOCK = (16, 32)
BLOCKWISE = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
ONE_SCALE = {"quant_method": "fp8", "activation_scheme": "static"}
ROW_WISE = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}


def plain_tensors():
    """A whole plain checkpoint."""
    torch.manual_seed(0)
    whole = {f"{name}.weight": torch.randn(PROJECTIONS[name.split(".", 3)[3]]) * 0.2 for name in NAMES}
    whole |= {
        f"model.layers.{i}.{name}.weight": 1 + 0.1 * torch.randn(n) for i in range(2) for name, n in NORMS.items()
    }
    ends = {"model.embed_tokens.weight": torch.randn(24, 48), "lm_head.weight": torch.randn(24, 48)}
    return whole | ends | {"model.norm.weight": torch.ones(48)}


def in_fp8(tensors, scales_of):
    """The checkpoint with its projections in FP8. scales_of: (float32 scale to store, its value for each number)."""
    stored = dict(tensors)
    for name in NAMES:
        scale, spread = scales_of(tensors[f"{name}.weight"])
        stored[f"{name}.weight"] = (tensors[f"{name}.weight"] / spread).to(FP8)
        stored[f"{name}.weight_scale"] = scale
    return stored


def row_scales(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    return scale, scale


def one_scale(weight):
    scale = weight.abs().max() / 448
    return scale, scale


def block_scales(weight):
    """Blocks of BLOCK; those at the edges are cut."""
    spread = torch.empty_like(weight)
    scale = torch.empty([-(-side // block) for side, block in zip(weight.shape, BLOCK)])
    for i, j in torch.cartesian_prod(*map(torch.arange, scale.shape)).tolist():
        part = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
        scale[i, j] = spread[part] = weight[part].abs().max() / 448
    return scale, spread


def as_weight_scale_inv(stored):
    return {name.replace(".weight_scale", ".weight_scale_inv"): tensor for name, tensor in stored.items()}


def load(folder, quantization=None, *, fp8=False, device="cpu", **changes):
    config = CONFIG | changes | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(ModelConfig.from_folder(folder))
    num_bytes = load_weights(model, folder, device=device, dtype=torch.float32, fp8=fp8)
    assert num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    return model


def logits(model, device="cpu"):
    """Of a few tokens, with all of q, k and v in them."""

    def attend(layer, qkv, norms):
        kv_heads = qkv.shape[1] // 4  # two query heads for each
        q, k, v = qkv.split([2 * kv_heads, kv_heads, kv_heads], dim=1)
        return (q + (k + v).repeat_interleave(2, dim=1)).flatten(1)

    model.set_max_positions(32)
    with torch.inference_mode():
        return model.logits(model(torch.arange(20, device=device), attend)).cpu()


def weights_of(model, name):
    """(weight, scale) of one projection, by the checkpoint's name of it."""
    loaded = model.checkpoint_tensors()
    return loaded[f"{name}.weight"], loaded[f"{name}.weight_scale"]
