"""A head in training: its shape and first values from the target, its forward pass in plain torch, its files.

Owns: these three. Does not know: batches, losses, schedules.

The parameters are those of `Eagle3Head`, which serves; that one's kernels have no gradients, so `unroll` computes the
same formula from torch's own operations, in the dtype that will serve, from parameters in float32.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from minserve.kernels.rope import apply_rope, gather_rope
from minserve.models.causal_lm import CausalLM
from minserve.models.config import ModelConfig, RopeConfig
from minserve.models.eagle3 import Eagle3Head, build_eagle3
from minserve.models.eagle3_config import Eagle3Config

from .attention import ChainAttention, ChainMasks

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


def standard_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Early, middle and late, as published heads have them; what there is for a target of few layers."""
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (0, (num_layers + 1) // 2, num_layers)


class HeadShape(NamedTuple):
    """What is chosen of a head; all else is the target's. window: tokens that it keeps behind its first block;
    intermediate_size: of its MLP; own_lm_head: trained and stored, not the target's rows."""

    draft_vocab_size: int
    window: int
    aux_layers: tuple[int, ...]
    intermediate_size: int
    own_lm_head: bool = False

    def config(self, target: ModelConfig) -> Eagle3Config:
        return Eagle3Config(
            family="SpecForge",
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            target_vocab_size=target.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            num_layers=1,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            intermediate_size=self.intermediate_size,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            aux_layers=self.aux_layers,
            window=self.window,
            attention_bias=target.attention_bias,
            mlp_bias=target.mlp_bias,
            qk_norm=target.qk_norm,
            has_lm_head=self.own_lm_head,
        )


def new_head(config: Eagle3Config, target: CausalLM, target_ids: torch.Tensor) -> Eagle3Head:
    """A head that begins as the target's last layer, in float32 on the target's device.

    fc passes the last of the three states on. Attention does not look at the token yet, only at the state, as that
    layer did. A wider MLP begins with the layer's own and, beside it, neurons whose output weighs nothing.
    target_ids: [draft_vocab_size] int64, ascending.
    """
    device = target.embed_tokens.weight.device
    head = build_eagle3(config).to(torch.float32).to_empty(device=device)
    assert head.target_ids is not None
    head.target_ids.copy_(target_ids)
    head.set_max_positions(target.rope_table.shape[0])
    size = config.hidden_size
    last = _plain_weights(target.layers[-1])
    own = {name: parameter.data for name, parameter in head.layers[0].named_parameters()}
    for name, parameter in own.items():
        if name in last and parameter.shape == last[name].shape:
            parameter.copy_(last[name])
    own["self_attn.qkv_proj.weight"].zero_()[:, size:] = last["self_attn.qkv_proj.weight"]
    own["input_layernorm.weight"].fill_(1.0)
    own["hidden_norm.weight"].copy_(last["input_layernorm.weight"])
    _widen(own, last, config)
    head.norm.weight.copy_(target.norm.weight)
    head.fc.weight.zero_()[:, -size:] = torch.eye(size, device=device)
    if head.lm_head is not None:
        rows = target.embed_tokens if target.lm_head is None else target.lm_head
        head.lm_head.weight.copy_(rows.weight[head.target_ids])
    return head.requires_grad_(True)


def take_values(head: Eagle3Head, other: Eagle3Head) -> None:
    """Begin where another head of the same shape is. Raises SystemExit if it has another."""
    shapes, others = ({name: p.shape for name, p in each.named_parameters()} for each in (head, other))
    differing = [name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name)]
    if differing:
        raise SystemExit(f"--start-from has another shape: {', '.join(sorted(differing))}")
    with torch.no_grad():
        for own, value in zip(head.parameters(), other.parameters(), strict=True):
            own.copy_(value)


def _plain_weights(layer: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's parameters by name, in float32 whatever they are kept in."""
    stored = dict(layer.named_parameters())
    plain = {name: parameter.detach().float() for name, parameter in stored.items()}
    for name in [name for name in plain if name.endswith(".weight_scale")]:
        plain[name.removesuffix("_scale")] *= plain.pop(name)[:, None]
    return plain


def _widen(own: Mapping[str, torch.Tensor], last: Mapping[str, torch.Tensor], config: Eagle3Config) -> None:
    """The MLP's weights where it is not as wide as the target's: as many of its neurons as fit, then new ones."""
    size, wide = last["mlp.down_proj.weight"].shape[1], config.intermediate_size
    if size == wide:
        return
    kept = min(size, wide)
    generator = torch.Generator().manual_seed(0)
    fresh = torch.randn(2, wide, config.hidden_size, generator=generator) * float(last["mlp.gate_up_proj.weight"].std())
    both = own["mlp.gate_up_proj.weight"].copy_(fresh.flatten(0, 1)).view(2, wide, -1)
    both[:, :kept] = last["mlp.gate_up_proj.weight"].view(2, size, -1)[:, :kept]
    own["mlp.down_proj.weight"].zero_()[:, :kept] = last["mlp.down_proj.weight"][:, :kept]
    if config.mlp_bias:
        biases = last["mlp.gate_up_proj.bias"].view(2, size)
        own["mlp.gate_up_proj.bias"].zero_().view(2, wide)[:, :kept] = biases[:, :kept]


class Unrolled(NamedTuple):
    """hidden: [texts * tokens, hidden] of one step, normed, for `lm_head`; what it says follows row t + step + 1."""

    hidden: torch.Tensor
    lm_head: torch.Tensor


def unroll(
    head: Eagle3Head,
    target: CausalLM,
    token_ids: torch.Tensor,
    aux: torch.Tensor,
    num_steps: int,
    masks: ChainMasks,
    tied_lm_head: torch.Tensor,
) -> Iterator[Unrolled]:
    """The training-time test: at every row a chain of drafts, fed with the text's own tokens.

    token_ids: [texts, tokens] int64; aux: the target's states of them, in the dtype to compute in; tied_lm_head: the
    target's rows of the head's ids. Step j of row t takes token t + 1 + j; rows for which there is none mean nothing.
    """
    weights = {name: parameter.to(aux.dtype) for name, parameter in head.named_parameters()}
    lm_head = weights.get("lm_head.weight", tied_lm_head)
    num_texts, num_tokens = token_ids.shape
    positions = torch.arange(num_tokens, device=aux.device).repeat(num_texts)
    last = head.rope_table.shape[0] - 1
    attention = ChainAttention(masks)
    hidden = F.linear(aux, weights["fc.weight"])
    for step in range(num_steps):
        embedded = F.embedding(token_ids.roll(-1 - step, dims=1).flatten(), target.embed_tokens.weight)
        rope = gather_rope(head.rope_table, (positions + step).clamp_max(last))
        hidden = _layer(weights, head.config, embedded, hidden, rope, attention, num_texts)
        yield Unrolled(_norm(hidden, weights["norm.weight"], head.config.rms_norm_eps), lm_head)


def _layer(
    weights: Mapping[str, torch.Tensor],
    config: Eagle3Config,
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    attention: ChainAttention,
    num_texts: int,
) -> torch.Tensor:
    """embedded, hidden: [texts * tokens, hidden]; the state behind them."""

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"layers.0.{name}.weight"], weights.get(f"layers.0.{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return _norm(x, weights[f"layers.0.{name}.weight"], config.rms_norm_eps)

    both = torch.cat((norm(embedded, "input_layernorm"), norm(hidden, "hidden_norm")), dim=-1)
    qkv = project(both, "self_attn.qkv_proj").unflatten(-1, (-1, config.head_dim))
    q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    if config.qk_norm:
        q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
    q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    attended = attention(*(x.unflatten(0, (num_texts, -1)) for x in (q, k, v)))
    hidden = hidden + project(attended.flatten(0, 1).flatten(1), "self_attn.o_proj")
    gate, up = project(norm(hidden, "post_attention_layernorm"), "mlp.gate_up_proj").chunk(2, dim=-1)
    return hidden + project(F.silu(gate) * up, "mlp.down_proj")


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As kernels.rms_norm, with a gradient on every device."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def save_head(head: Eagle3Head, folder: Path, max_positions: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write config.json and model.safetensors in the layout of SpecForge. Returns the bytes of the latter."""
    config, target_ids = head.config, head.target_ids
    assert target_ids is not None
    marks = torch.zeros(config.target_vocab_size, dtype=torch.bool)
    marks[target_ids.cpu()] = True
    parts = {name: part.detach().to("cpu", dtype) for name, part in head.checkpoint_tensors().items()}
    tensors = {name.replace("layers.0.", "midlayer."): part.contiguous() for name, part in parts.items()}
    tensors |= {"d2t": target_ids.cpu() - torch.arange(len(target_ids)), "t2d": marks}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # The library makes it for its owner alone.
    fields = config_fields(config, max_positions, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return path.stat().st_size


def config_fields(config: Eagle3Config, max_positions: int, dtype: str) -> dict[str, Any]:
    """What config.json says of a head. Layers are named by what they put out, as eagle_config has them."""
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    ours = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, own) for name, own in zip(same, ours)},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": max_positions,
        "rope_parameters": rope_fields(config.rope),
        "use_sliding_window": True,
        "sliding_window": config.window,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers],
            "use_aux_hidden_state": True,
        },
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """As transformers 5 writes them."""
    values = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.kind]}
    scaling = {name: value for name, value in values.items() if value is not None}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **scaling}
