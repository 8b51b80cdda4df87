"""Draft heads for tiny engines: a random one on disk, and an oracle that knows what the model will say."""

import json
import random

import torch
from safetensors.torch import save_file

from minserve.memory.transfer import to_device
from tests.engine.tiny import CONFIG, VOCAB

DRAFT_VOCAB = 60


def write_head(folder, hidden=CONFIG["hidden_size"], head_dim=8, seed=3):
    """A random SpecForge head for the tiny model; its ids are every third of the target's and some more."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random_weight(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    heads, kv_heads, inner = 4, 2, 48
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = {
        "fc.weight": random_weight(hidden, 3 * hidden),
        "norm.weight": 1 + random_weight(hidden),
        "lm_head.weight": random_weight(DRAFT_VOCAB, hidden),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + random_weight(hidden)
    shapes = {
        "self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for name, shape in shapes.items():
        tensors[f"midlayer.{name}.weight"] = random_weight(*shape)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Oracle:
    """In place of an engine's drafter: proposes what each text goes on with, and now and then something else.

    texts: the whole output of each request, by id.
    """

    aux_layers = ()
    nbytes = 0

    def __init__(self, engine, texts, share_right, seed=0):
        self._scheduler, self._lanes = engine._scheduler, engine._lanes
        self._texts = texts
        self._share_right = share_right
        self._random = random.Random(seed)
        engine._runner._drafter = engine._runner._decode._drafter = self

    def forget(self, lanes):
        pass

    def read(self, chunks, aux, sampled):
        pass

    def propose(self, aux, tokens, counts, lane_ids, num_proposals):
        by_lane = {request.lane: request for request in self._scheduler.running}
        rows = []
        for lane in lane_ids.tolist():
            request = by_lane[lane]
            first = int(self._lanes.num_tokens[lane]) - request.num_prompt_tokens
            right = [*self._texts[request.id][first : first + num_proposals], *[0] * num_proposals][:num_proposals]
            rows.append(
                [token if self._random.random() < self._share_right else (token + 1) % VOCAB for token in right]
            )
        drafts = to_device(rows, torch.int64, lane_ids.device).T if num_proposals else []
        self._lanes.set_drafts(lane_ids, list(drafts))
