"""Safetensors into parameters: every tensor in its place, and a clear refusal of those that do not fit."""

import pytest
import torch

from minserve.errors import WeightsError
from minserve.models.causal_lm import build_model
from minserve.models.config import ModelConfig
from minserve.weights.loader import init_dummy_weights
from tests.unit.checkpoints import CONFIG, halves, load, random_tensors, save, save_sharded


@pytest.fixture
def tensors():
    return random_tensors()


# What is loaded


def test_projections_of_one_input_are_stacked_in_order(tmp_path, tensors):
    save(tmp_path, tensors)
    model, _ = load(tmp_path)
    layer = model.layers[1]
    q, k, v = (tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    gate, up = (tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat((q, k, v)))
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat((gate, up)))


def test_every_tensor_reaches_its_parameter_and_every_parameter_is_filled(tmp_path, tensors):
    save(tmp_path, tensors)
    model, num_bytes = load(tmp_path)
    loaded = model.checkpoint_tensors()
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert num_bytes == sum(t.nbytes for t in tensors.values()) == sum(p.nbytes for p in model.parameters())
    assert not any(p.is_meta or p.requires_grad for p in model.parameters())


def test_shards_load_like_one_file(tmp_path, tensors):
    save_sharded(tmp_path, *halves(tensors))
    model, _ = load(tmp_path)
    assert all(torch.equal(model.checkpoint_tensors()[name], tensors[name]) for name in tensors)


def test_weights_are_converted_to_the_wanted_dtype(tmp_path, tensors):
    save(tmp_path, {name: tensor.half() for name, tensor in tensors.items()})
    model, num_bytes = load(tmp_path, dtype=torch.bfloat16)
    expected = tensors["model.norm.weight"].half().bfloat16()
    assert torch.equal(model.norm.weight, expected)
    assert num_bytes == 2 * sum(t.numel() for t in tensors.values())


def test_progress_counts_bytes_up_to_the_total(tmp_path, tensors):
    save_sharded(tmp_path, *halves(tensors))
    seen = []
    _, num_bytes = load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == len(tensors)
    assert seen == sorted(seen)
    assert seen[-1] == (num_bytes, num_bytes)


def test_a_tied_head_may_be_absent_or_present(tmp_path, tensors):
    tied = ModelConfig(**{f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__} | {"tie_word_embeddings": True})
    save(tmp_path, tensors)
    with_head, _ = load(tmp_path, tied)
    head = tensors.pop("lm_head.weight")
    save(tmp_path, tensors)
    without, num_bytes = load(tmp_path, tied)
    hidden = torch.randn(3, 8)
    expected = hidden @ tensors["model.embed_tokens.weight"].T
    torch.testing.assert_close(without.logits(hidden), expected)
    torch.testing.assert_close(with_head.logits(hidden), expected)
    assert num_bytes == sum(t.nbytes for t in tensors.values())
    assert not torch.equal(head, tensors["model.embed_tokens.weight"])


def test_stored_rope_frequencies_of_old_checkpoints_are_passed_over(tmp_path, tensors):
    save(tmp_path, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    load(tmp_path)


# What does not fit


def test_missing_tensors_are_named(tmp_path, tensors):
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"1 tensors are missing: model.layers.1.self_attn.k_norm.weight"):
        load(tmp_path)


def test_left_over_tensors_are_named(tmp_path, tensors):
    save(tmp_path, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(8)})
    with pytest.raises(WeightsError, match=r"1 tensors are left over: model.layers.0.self_attn.q_proj.bias"):
        load(tmp_path)


def test_of_many_names_the_first_and_their_number_are_told(tmp_path, tensors):
    save(tmp_path, {f"encoder.{i:02}": torch.ones(1) for i in range(20)})
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert "25 tensors are missing: lm_head.weight, model.embed_tokens.weight," in str(caught.value)
    assert "20 tensors are left over: encoder.00, encoder.01, encoder.02, encoder.03, encoder.04 and 15 more" in str(
        caught.value
    )


@pytest.mark.parametrize("shape", [(8, 4), (4, 9), (32,), (1,), ()])
def test_a_wrong_shape_is_told_with_the_right_one(tmp_path, tensors, shape):
    save(tmp_path, tensors | {"model.layers.0.self_attn.k_proj.weight": torch.ones(shape)})
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert f"model.layers.0.self_attn.k_proj.weight is {list(shape)} where config.json says [4, 8]" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.uint8])
def test_quantized_or_whole_numbers_are_no_weights(tmp_path, tensors, dtype):
    save(tmp_path, tensors | {"model.norm.weight": torch.ones(8).to(dtype)})
    with pytest.raises(WeightsError, match=r"model.norm.weight holds .*; supported are F64, F32, BF16, F16"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path, tensors):
    _, second = halves(tensors)
    save_sharded(
        tmp_path,
        tensors,
        second,
        weight_map={"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    )
    with pytest.raises(WeightsError, match="also stands in another file"):
        load(tmp_path)


# Dummy weights


def test_dummy_weights_are_small_random_and_repeatable(tmp_path):
    models = [build_model(CONFIG) for _ in range(3)]
    sizes = [init_dummy_weights(m, device="cpu", dtype=torch.bfloat16, seed=s) for m, s in zip(models, (1, 1, 2))]
    first, again, other = (dict(m.named_parameters()) for m in models)
    assert sizes[0] == sum(p.nbytes for p in first.values())
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in first.values())
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert 0.01 < first["lm_head.weight"].float().std() < 0.03
    assert all((p == 1).all() for n, p in first.items() if "norm" in n)
