"""Draft heads for tests: a random one on disk, what it says, and an oracle that knows what the model will say."""

import json
import random

import torch
from safetensors.torch import save_file

from minserve.memory.transfer import to_device
from minserve.models.causal_lm import AuxStates
from tests.engine.tiny import CONFIG, VOCAB
from tests.unit.dense_attend import DenseAttend

DRAFT_VOCAB = 60


def write_head(folder, hidden=CONFIG["hidden_size"], head_dim=8, seed=3, vocab=VOCAB, ids=None, **fields):
    """A random SpecForge head, for the tiny model unless other sizes are given. ids: what it can say; with one id, that
    is what it always says. fields: more of its config."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random_weight(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    if ids is None:
        ids = torch.randperm(vocab, generator=generator)[:DRAFT_VOCAB].sort().values.tolist()
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
        "vocab_size": vocab,
        "draft_vocab_size": len(ids),
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        **fields,
    }
    tensors = {
        "fc.weight": random_weight(hidden, 3 * hidden),
        "norm.weight": 1 + random_weight(hidden),
        "lm_head.weight": random_weight(len(ids), hidden),
        "d2t": torch.tensor(ids) - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True),
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


def drafts_anew(engine, text, count):
    """The head's drafts behind a text, greedily: one pass of the target over it, one of the head, then a chain."""
    model, head = engine._runner._model, engine._runner._drafter._head
    aux = AuxStates(head.config.aux_layers, torch.empty(len(text) - 1, 3 * model.config.hidden_size))
    model(torch.tensor(text[:-1]), DenseAttend(model), aux)
    attend = DenseAttend(head)
    state = head(torch.tensor(text[1:]), head.combine(aux.states), attend)[-1:]
    drafts = []
    for _ in range(count):
        drafts.append(int(head.to_target(head.logits(state).argmax(dim=-1))))
        state = head(torch.tensor(drafts[-1:]), state, attend)
    return drafts


class Oracle:
    """In place of an engine's drafter: proposes what each text goes on with, and now and then something else.

    texts: the whole output of each request, by id. wrong: what it says instead of a token.
    """

    aux_layers = ()
    nbytes = 0

    def __init__(self, engine, texts, share_right, seed=0, wrong=lambda token: (token + 1) % VOCAB):
        self._scheduler, self._lanes = engine._scheduler, engine._lanes
        self._texts = texts
        self._share_right = share_right
        self._wrong = wrong
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
            rows.append([token if self._random.random() < self._share_right else self._wrong(token) for token in right])
        drafts = to_device(rows, torch.int64, lane_ids.device).T if num_proposals else []
        self._lanes.set_drafts(lane_ids, list(drafts))
