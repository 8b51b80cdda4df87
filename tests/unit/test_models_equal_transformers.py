"""The models compute what transformers computes: same config.json, same weights, same logits.

transformers is the reference; both sides read one saved folder, so that loading is tested along with computing.
"""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minserve.models.causal_lm import AuxStates, build_model
from minserve.models.config import ModelConfig
from minserve.weights.loader import load_weights
from tests.unit.dense_attend import DenseAttend

NUM_TOKENS = 40
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "default": {"rope_type": "default"},
    "another base": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3 | {"rope_theta": 500.0},
    "yarn": YARN | {"rope_theta": 500.0},
    "yarn, given factor": YARN | {"attention_factor": 0.8},
    "yarn, betas": YARN | {"beta_fast": 8.0, "beta_slow": 0.5},
    "yarn, not truncated": YARN | {"rope_theta": 500.0, "truncate": False},
    "yarn, mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def save_reference(folder, model_class, config):
    """A transformers model with weights far from its even initial ones, saved as safetensors; and the model."""
    reference = model_class(config).eval()
    for parameter in reference.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    reference.save_pretrained(folder)
    return reference


def load(folder, num_positions=NUM_TOKENS):
    model = build_model(ModelConfig.from_folder(folder))
    load_weights(model, folder, device="cpu", dtype=torch.float32)
    model.set_max_positions(num_positions)
    return model


def assert_same_logits(folder, reference):
    token_ids = torch.randint(SIZES["vocab_size"], (NUM_TOKENS,))
    expected = reference(token_ids[None]).logits[0]
    model = load(folder)
    actual = model.logits(model(token_ids, DenseAttend(model)))
    assert expected.std() > 0.5, "the reference must say something"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_the_same_for_every_kind_of_rope(tmp_path, family, rope):
    rope = {"rope_theta": 10000.0} | rope
    if family == "llama":
        reference = save_reference(tmp_path, LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=rope))
    else:
        config = Qwen3Config(**SIZES, head_dim=16, rope_parameters=rope)
        reference = save_reference(tmp_path, Qwen3ForCausalLM, config)
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 6], ids=["one KV head", "grouped", "as many as heads"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_the_same_for_every_sharing_of_kv_heads(tmp_path, family, num_kv_heads):
    sizes = SIZES | {"num_key_value_heads": num_kv_heads}
    if family == "llama":
        reference = save_reference(tmp_path, LlamaForCausalLM, LlamaConfig(**sizes))
    else:
        reference = save_reference(tmp_path, Qwen3ForCausalLM, Qwen3Config(**sizes, head_dim=16))
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize("option", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_logits_are_the_same_for_llama_with(tmp_path, option):
    config = LlamaConfig(**SIZES, **{option: True})
    assert_same_logits(tmp_path, save_reference(tmp_path, LlamaForCausalLM, config))


@pytest.mark.parametrize("option", ["tie_word_embeddings", "attention_bias"])
def test_logits_are_the_same_for_qwen3_with(tmp_path, option):
    config = Qwen3Config(**SIZES, head_dim=16, **{option: True})
    assert_same_logits(tmp_path, save_reference(tmp_path, Qwen3ForCausalLM, config))


def test_head_dim_need_not_be_hidden_size_over_heads(tmp_path):
    config = LlamaConfig(**SIZES, head_dim=20)
    assert_same_logits(tmp_path, save_reference(tmp_path, LlamaForCausalLM, config))


@pytest.mark.parametrize("type_name", ["type", "rope_type"])
@pytest.mark.parametrize("dtype_name", ["dtype", "torch_dtype"])
def test_the_older_spelling_of_a_config_means_the_same(tmp_path, type_name, dtype_name):
    rope = LLAMA3 | {"rope_theta": 500.0}
    reference = save_reference(tmp_path, LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=rope))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[type_name] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config[dtype_name] = config.pop("dtype")
    path.write_text(json.dumps(config))
    assert_same_logits(tmp_path, reference)


def test_a_sequence_may_be_computed_in_pieces(tmp_path):
    """Prefill in chunks and decode are one thing: positions and the attend callable carry all state."""
    save_reference(tmp_path, LlamaForCausalLM, LlamaConfig(**SIZES))
    model, token_ids = load(tmp_path), torch.randint(96, (NUM_TOKENS,))
    whole = model(token_ids, DenseAttend(model))
    attend = DenseAttend(model)
    pieces = [model(token_ids[a:b], attend) for a, b in [(0, 17), (17, 39), (39, 40)]]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-4)


def test_the_model_can_be_computed_in_bfloat16(tmp_path):
    reference = save_reference(tmp_path, Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16))
    model = build_model(ModelConfig.from_folder(tmp_path))
    load_weights(model, tmp_path, device="cpu", dtype=torch.bfloat16)
    model.set_max_positions(NUM_TOKENS)
    token_ids = torch.randint(96, (NUM_TOKENS,))
    logits = model.logits(model(token_ids, DenseAttend(model)))
    assert logits.dtype == torch.bfloat16
    assert model.rope_table.dtype == torch.float32, "bfloat16 cannot tell far positions apart"
    error = (logits.float() - reference(token_ids[None]).logits[0]).norm() / logits.float().norm()
    assert error < 0.05


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2, 3), (2,), (2, 2)], ids=str)
def test_what_comes_into_a_layer_is_transformers_hidden_state_of_that_number(tmp_path, layers):
    """And the number of layers means what the last one puts out, which transformers shows only to a hook."""
    reference = save_reference(tmp_path, LlamaForCausalLM, LlamaConfig(**SIZES))
    token_ids = torch.randint(SIZES["vocab_size"], (NUM_TOKENS,))
    last = []
    reference.model.layers[-1].register_forward_hook(lambda module, args, out: last.append(out))
    states = [*reference(token_ids[None], output_hidden_states=True).hidden_states[:-1], *last]
    model = load(tmp_path)
    aux = AuxStates(layers, torch.full((NUM_TOKENS, len(layers) * SIZES["hidden_size"]), float("nan")))
    hidden = model(token_ids, DenseAttend(model), aux)
    expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
    torch.testing.assert_close(aux.states, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(hidden, model(token_ids, DenseAttend(model))), "who looks changes nothing"
