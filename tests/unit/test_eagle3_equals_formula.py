"""Heads of all families compute the published formula: written out here a second time, plainly and in float64."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minserve.kernels.rms_norm import rms_norm
from tests.unit.dense_attend import DenseAttend
from tests.unit.eagle3_heads import FAMILIES, IDS, NUM_POSITIONS, VOCAB, HeadOnDisk, load, make_target

NUM_PROMPT, NUM_DRAFTS = 9, 3
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4}


class Formula:
    """EAGLE-3, from the paper and from what the families' own code does; keys and values are kept for later passes.

    w: tensors by the names of ModelOpt; embedding, lm_head: the rows to use. flags: norm_before_residual, norm_output.
    """

    def __init__(self, written, embedding, lm_head, rope, flags=()):
        self.w = {name: tensor.double() for name, tensor in written.tensors.items() if tensor.is_floating_point()}
        self.sizes, self.embedding, self.lm_head, self.flags = (
            written.sizes,
            embedding.double(),
            lm_head.double(),
            flags,
        )
        self.kv = {}
        config = LlamaConfig(
            head_dim=self.sizes["head_dim"], max_position_embeddings=NUM_POSITIONS, rope_parameters=rope
        )
        at_all = torch.arange(NUM_POSITIONS)[None]
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), at_all)
        self.cos, self.sin = cos[0].double(), sin[0].double()

    def norm(self, x, name):
        scale = x.pow(2).mean(-1, keepdim=True).add(self.sizes["rms_norm_eps"]).rsqrt()
        return x * scale * self.w[f"{name}.weight"]

    def project(self, x, name):
        bias = self.w.get(f"{name}.bias", torch.zeros((), dtype=torch.float64))
        return x @ self.w[f"{name}.weight"].T + bias

    def combine(self, aux):
        aux = aux.double()
        if "input_norm.weight" in self.w:
            aux = self.norm(aux, "input_norm")
        if "fc_norm.0.weight" in self.w:
            low, middle, high = aux.chunk(3, dim=-1)
            aux = torch.cat([self.norm(x, f"fc_norm.{i}") for i, x in enumerate((low, middle, high))], dim=-1)
        return self.project(aux, "fc")

    def attention(self, x, layer):
        prefix, width = f"layers.{layer}.self_attn", self.sizes["head_dim"]
        q, k, v = (self.project(x, f"{prefix}.{n}_proj").unflatten(-1, (-1, width)) for n in "qkv")
        if f"{prefix}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{prefix}.q_norm"), self.norm(k, f"{prefix}.k_norm")
        old_k, old_v = self.kv.get(layer, (k[:0], v[:0]))
        first = len(old_k)
        cos, sin = (table[first : first + len(x), None] for table in (self.cos, self.sin))
        q, k = (t * cos + torch.cat((-t[..., width // 2 :], t[..., : width // 2]), dim=-1) * sin for t in (q, k))
        k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.kv[layer] = k, v
        rows = []
        for i in range(len(x)):
            seen, heads = first + i + 1, []
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                weights = (k[:seen, shared] @ q[i, head] / width**0.5).softmax(0)
                heads.append(weights @ v[:seen, shared])
            rows.append(torch.cat(heads))
        return self.project(torch.stack(rows), f"{prefix}.o_proj")

    def forward(self, token_ids, hidden):
        for layer in range(self.sizes["num_hidden_layers"]):
            name = f"layers.{layer}"
            residual = hidden
            if layer == 0:
                normed = self.norm(hidden, f"{name}.hidden_norm")
                x = torch.cat((self.norm(self.embedding[token_ids], f"{name}.input_layernorm"), normed), dim=-1)
                residual = normed if "norm_before_residual" in self.flags else hidden
            else:
                x = self.norm(hidden, f"{name}.input_layernorm")
            y = residual + self.attention(x, layer)
            x = self.norm(y, f"{name}.post_attention_layernorm")
            gate, up = (self.project(x, f"{name}.mlp.{n}_proj") for n in ("gate", "up"))
            hidden = y + self.project(gate * gate.sigmoid() * up, f"{name}.mlp.down_proj")
        return self.norm(hidden, "norm") if "norm_output" in self.flags else hidden

    def logits(self, hidden):
        return (hidden if "norm_output" in self.flags else self.norm(hidden, "norm")) @ self.lm_head.T


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def target():
    return make_target()


def assert_same_chain(folder, written, target, *, rope, flags=(), embedding=None, lm_head=None):
    """A prompt, whose states come from the target, and drafts, each from the head's own last state and last draft."""
    head = load(folder, target.config)
    head.share_with(target)
    head.set_max_positions(NUM_POSITIONS)
    embedding = target.embed_tokens.weight if embedding is None else embedding
    lm_head = written.tensors["lm_head.weight"] if lm_head is None else lm_head
    formula, attend = Formula(written, embedding, lm_head, rope, flags), DenseAttend(head)
    offsets = written.tensors.get("d2t", torch.zeros(VOCAB, dtype=torch.int64))

    token_ids, aux = torch.randint(VOCAB, (NUM_PROMPT,)), torch.randn(NUM_PROMPT, 3 * target.config.hidden_size)
    hidden, expected = head.combine(aux), formula.combine(aux)
    for _ in range(1 + NUM_DRAFTS):
        before = hidden.clone()
        after, expected = head(token_ids, hidden, attend), formula.forward(token_ids, expected)
        assert torch.equal(hidden, before), "the states that come in are the caller's"
        assert_close(after, expected)
        logits, expected_logits = head.logits(after), formula.logits(expected)
        assert_close(logits, expected_logits)
        assert expected_logits.std() > 0.1, "the formula must say something"
        drafted = logits[-1:].argmax(-1)
        token_ids = head.to_target(drafted)
        assert torch.equal(token_ids, drafted + offsets[drafted])
        hidden, expected = after[-1:], expected[-1:]
    return head


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)


ROPE_OF = {
    "EAGLE": {"rope_type": "default", "rope_theta": 10000.0},
    "SpecForge": {"rope_type": "default", "rope_theta": 500.0},
    "NVIDIA ModelOpt": {"rope_type": "default", "rope_theta": 10000.0},
    "speculators": {"rope_type": "default", "rope_theta": 700.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_each_family(tmp_path, target, family):
    parts = {"lm_head", "d2t"} | (set() if family == "NVIDIA ModelOpt" else {"t2d"})
    head = assert_same_chain(
        tmp_path, HeadOnDisk(family, frozenset(parts)).write(tmp_path), target, rope=ROPE_OF[family]
    )
    assert head.config.family == family
    assert head.config.aux_layers == {"NVIDIA ModelOpt": (2, 4, 7), "speculators": (1, 4, 8)}.get(family, (2, 4, 5))


@pytest.mark.parametrize(
    "part", ["attention_bias", "mlp_bias", "fc_bias", "qk_norm", "input_norm", "fc_norm", "embed_tokens"]
)
@pytest.mark.parametrize("family", ["EAGLE", "speculators"])
def test_every_optional_part_is_used_if_its_tensors_are_there(tmp_path, target, family, part):
    written = HeadOnDisk(family, frozenset(("lm_head", "d2t", part))).write(tmp_path)
    own = written.tensors.get("embed_tokens.weight")
    assert_same_chain(tmp_path, written, target, rope=ROPE_OF[family], embedding=own)


def test_norms_before_fc_follow_each_other_if_both_are_there(tmp_path, target):
    parts = frozenset(("lm_head", "d2t", "input_norm", "fc_norm"))
    written = HeadOnDisk("speculators", parts, extra={"norm_before_fc": True, "fc_norm": True}).write(tmp_path)
    assert_same_chain(tmp_path, written, target, rope=ROPE_OF["speculators"])


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
@pytest.mark.parametrize("family", ["SpecForge", "speculators"])
def test_every_flag_that_changes_the_formula(tmp_path, target, family, flag):
    written = HeadOnDisk(family, extra={flag: True}).write(tmp_path)
    assert_same_chain(tmp_path, written, target, rope=ROPE_OF[family], flags=(flag,))


@pytest.mark.parametrize("names", ["layers", "midlayer", "hidden_norm"])
def test_layers_after_the_first_are_ordinary_ones_whatever_they_are_called(tmp_path, target, names):
    """ModelOpt has layers.N; Megatron's exports have midlayer.N and call the norm before attention hidden_norm."""
    written = HeadOnDisk("NVIDIA ModelOpt", frozenset(("lm_head",)), sizes={"num_hidden_layers": 3})
    stored = written.stored
    if names == "midlayer":
        written.stored = lambda: {name.replace("layers.", "midlayer."): tensor for name, tensor in stored().items()}
    elif names == "hidden_norm":
        again = {f"layers.{i}.input_layernorm": f"layers.{i}.hidden_norm" for i in (1, 2)}
        written.stored = lambda: {
            name.replace(prefix := name.removesuffix(".weight"), again.get(prefix, prefix)): tensor
            for name, tensor in stored().items()
        }
    head = assert_same_chain(tmp_path, written.write(tmp_path), target, rope=ROPE_OF["NVIDIA ModelOpt"])
    assert head.num_layers == 3


def test_a_head_without_d2t_speaks_the_targets_ids(tmp_path, target):
    head = assert_same_chain(
        tmp_path,
        HeadOnDisk("SpecForge", frozenset(("lm_head", "t2d"))).write(tmp_path),
        target,
        rope=ROPE_OF["SpecForge"],
    )
    assert head.config.draft_vocab_size == VOCAB


@pytest.mark.parametrize("tied_target", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_head_without_lm_head_has_the_targets_rows_of_its_own_tokens(tmp_path, mapped, tied_target):
    target = make_target(tie_word_embeddings=tied_target)
    for parameter in target.parameters():
        parameter.mul_(25)  # random weights of 0.02 would say too little
    written = HeadOnDisk("SpecForge", frozenset(("d2t",) if mapped else ())).write(tmp_path)
    rows = target.embed_tokens.weight if tied_target else target.lm_head.weight
    if mapped:
        rows = rows[torch.arange(12) + written.tensors["d2t"]]
    head = assert_same_chain(tmp_path, written, target, rope=ROPE_OF["SpecForge"], lm_head=rows)
    assert "tied lm_head" in head.describe()


def test_a_head_that_ties_its_embedding_has_that_for_its_lm_head(tmp_path, target):
    parts, extra = frozenset(("d2t", "embed_tokens")), {"tie_word_embeddings": True}
    written = HeadOnDisk("SpecForge", parts, extra=extra).write(tmp_path)
    own = written.tensors["embed_tokens.weight"]
    rows = own[torch.arange(12) + written.tensors["d2t"]]
    assert_same_chain(tmp_path, written, target, rope=ROPE_OF["SpecForge"], embedding=own, lm_head=rows)


def test_a_head_of_another_size_than_its_target_s(tmp_path):
    target = make_target(hidden_size=20)
    parts = frozenset(("lm_head", "d2t", "embed_tokens", "fc_norm"))
    written = HeadOnDisk("speculators", parts, target_hidden=20, extra={"target_hidden_size": 20}).write(tmp_path)
    own = written.tensors["embed_tokens.weight"]
    assert_same_chain(tmp_path, written, target, rope=ROPE_OF["speculators"], embedding=own)


def test_yarn_with_its_scale_in_cos_and_sin(tmp_path, target):
    written = HeadOnDisk("EAGLE", extra={"rope_scaling": YARN}).write(tmp_path)
    assert_same_chain(tmp_path, written, target, rope=YARN | {"rope_theta": 10000.0})


def test_positions_reach_as_far_as_the_targets_and_not_as_the_config_says(tmp_path, target):
    """The config says 4, which the chains of the other tests pass too."""
    written = HeadOnDisk("EAGLE").write(tmp_path)
    assert written.config()["max_position_embeddings"] == 4
    head = load(tmp_path, target.config)
    head.set_max_positions(5000)
    assert head.rope_table.shape == (5000, 2, 3)
    assert head.rope_table.isfinite().all()


def test_what_the_target_has_is_shared_and_not_copied(tmp_path, target):
    HeadOnDisk("SpecForge", frozenset()).write(tmp_path)
    head = load(tmp_path, target.config)
    own_bytes = sum(parameter.nbytes for parameter in head.parameters())
    head.share_with(target)
    assert sum(parameter.nbytes for parameter in head.parameters()) == own_bytes
    token_ids, hidden = torch.randint(VOCAB, (2,)), torch.randn(2, 16)
    head.set_max_positions(NUM_POSITIONS)
    state, logits = head(token_ids, hidden, DenseAttend(head)), head.logits(hidden)
    target.embed_tokens.weight.mul_(-1)
    target.lm_head.weight.mul_(2)
    assert not torch.equal(head(token_ids, hidden, DenseAttend(head)), state)
    torch.testing.assert_close(head.logits(hidden), 2 * logits)


@pytest.mark.parametrize("flags", [(), ("norm_before_residual",), ("norm_output",)], ids=str)
def test_norms_may_write_over_the_residual_as_those_of_cuda_do(tmp_path, target, monkeypatch, flags):
    """And they want contiguous rows. The chain checks that the states that come in stay as they are."""

    def norm(x, weight, eps):
        assert x.is_contiguous()
        return rms_norm(x, weight, eps)

    def add_norm(x, residual, weight, eps):
        assert x.is_contiguous()
        return norm(residual.add_(x), weight, eps), residual

    monkeypatch.setattr("minserve.models.layers.rms_norm", norm)
    monkeypatch.setattr("minserve.models.layers.add_rms_norm", add_norm)
    parts, sizes = frozenset(("lm_head", "d2t", "input_norm", "fc_norm")), {"num_hidden_layers": 2}
    written = HeadOnDisk("speculators", parts, sizes, extra=dict.fromkeys(flags, True)).write(tmp_path)
    assert_same_chain(tmp_path, written, target, rope=ROPE_OF["speculators"], flags=flags)


def test_in_bfloat16_all_but_positions_and_ids_is_bfloat16(tmp_path, target):
    HeadOnDisk("SpecForge", extra={IDS: [0, 1, 2]}).write(tmp_path)
    head, exact = load(tmp_path, target.config, torch.bfloat16), load(tmp_path, target.config)
    for one in (head, exact):
        one.share_with(target.to(one.fc.weight.dtype))
        one.set_max_positions(NUM_POSITIONS)
    assert (head.rope_table.dtype, head.target_ids.dtype) == (torch.float32, torch.int64)
    token_ids, aux = torch.randint(VOCAB, (NUM_PROMPT,)), torch.randn(NUM_PROMPT, 48)
    logits, expected = (
        one.logits(one(token_ids, one.combine(aux.to(one.fc.weight.dtype)), DenseAttend(one))) for one in (head, exact)
    )
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).norm() / expected.norm() < 0.05
