"""Drafts without a trained head: a random head, and a sampler that says how many of its drafts are right.

Owns: that luck, drawn on the device, so that a graph may hold it. Does not know: what is measured.
"""

import json
from pathlib import Path

import torch

from minserve.kernels.accept_drafts import Limits, accept_drafts
from minserve.kernels.sampling import draw
from minserve.memory.lanes import Lanes
from minserve.models.causal_lm import CausalLM
from minserve.models.eagle3 import Eagle3Head, build_eagle3
from minserve.models.eagle3_config import read_eagle3_config
from minserve.models.layers import RMSNorm
from minserve.runner.sampler import Sampler
from tools.workload import draft_config


class LuckySampler(Sampler):
    """Each draft is right with the same chance, whatever the model says. chance: [1] float32 on the device.

    Without drafts it is the ordinary one. The luck comes from torch's own generator of the device.
    """

    def __init__(self, lanes: Lanes, vocab_size: int) -> None:
        super().__init__(lanes, vocab_size, ())
        self._vocab_size = vocab_size
        self.chance = torch.zeros(1, device=lanes.device)

    def sample(
        self, logits: torch.Tensor, lane_ids: torch.Tensor, *, adjusted: bool, limits: Limits | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lanes, num_drafts = self._lanes, len(logits) // len(lane_ids) - 1
        tokens = draw(logits, lane_ids, lanes.sampling, None)
        if num_drafts:
            own = tokens.view(len(lane_ids), -1)[:, :num_drafts]
            drafts = lanes.drafts[lane_ids.clamp_min(0), :num_drafts]
            lucky = (torch.rand(drafts.shape, device=drafts.device) < self.chance) & (drafts >= 0)
            wrong = torch.where(own == drafts, (own + 1) % self._vocab_size, own)
            own.copy_(torch.where(lucky, drafts, wrong))
        counts = accept_drafts(tokens, lane_ids, lanes.drafts, lanes.last_token, lanes.num_tokens, limits)
        return tokens.view(len(lane_ids), -1), counts


def chance_for(tokens_a_step: float, num_verified: int) -> float:
    """How likely each draft has to be right for so many tokens a step: the p of 1 + p + ... + p^m = tokens_a_step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        expected = sum(middle**number for number in range(num_verified + 1))
        low, high = (middle, high) if expected < tokens_a_step else (low, middle)
    return low


def dummy_head(folder: Path, model: CausalLM, device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    """A random EAGLE-3 head for the model whose config.json is in the folder; it shares the model's embedding."""
    target = json.loads((folder / "config.json").read_text())
    config = draft_config(target)
    own = folder / "head"
    own.mkdir()
    (own / "config.json").write_text(json.dumps(config))
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "d2t": (config["draft_vocab_size"],),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    head = build_eagle3(read_eagle3_config(own, shapes, model.config)).to(dtype)
    head.to_empty(device=device)
    for module in head.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    assert head.target_ids is not None
    head.target_ids.copy_(torch.arange(len(head.target_ids)))
    head.share_with(model)
    return head
