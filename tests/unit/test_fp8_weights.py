"""Projections in 8 bits: quantized when a plain checkpoint is loaded, or as an FP8 checkpoint has them."""

import json

import pytest
import torch

from minserve.errors import ConfigError, WeightsError
from minserve.kernels.fp8 import FP8, quantize_rows
from minserve.models.causal_lm import build_model
from minserve.models.config import ModelConfig
from minserve.models.layers import Linear
from minserve.weights.loader import init_dummy_weights
from tests.unit.checkpoints import save, save_sharded
from tests.unit.fp8_checkpoints import (
    BLOCKWISE,
    CONFIG,
    NAMES,
    ONE_SCALE,
    ROW_WISE,
    as_weight_scale_inv,
    block_scales,
    in_fp8,
    load,
    logits,
    one_scale,
    plain_tensors,
    row_scales,
    weights_of,
)


@pytest.fixture
def tensors():
    return plain_tensors()


def rounded(x):
    """What is left of x after it has been in 8 bits, row by row."""
    x8, scale = quantize_rows(x)
    return x8.float() * scale[:, None]


def distance(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


# A plain checkpoint, in 8 bits


def test_all_projections_of_layers_are_quantized_row_by_row_and_nothing_else_is(tmp_path, tensors):
    save(tmp_path, tensors)
    model = load(tmp_path, fp8=True)
    loaded = model.checkpoint_tensors()
    assert {name for name, tensor in loaded.items() if tensor.dtype == FP8} == {f"{name}.weight" for name in NAMES}
    for name in NAMES:
        weight, scale = quantize_rows(tensors[f"{name}.weight"])
        assert torch.equal(weights_of(model, name)[0].float(), weight.float())
        assert torch.equal(weights_of(model, name)[1], scale)
    assert torch.equal(loaded["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(
        loaded["model.layers.1.input_layernorm.weight"], tensors["model.layers.1.input_layernorm.weight"]
    )


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_logits_stay_close_to_the_plain_models(tmp_path, tensors, stored):
    save(tmp_path, {name: tensor.to(stored) for name, tensor in tensors.items()})
    assert 0.001 < distance(logits(load(tmp_path, fp8=True)), logits(load(tmp_path))) < 0.15


def test_biases_stay_plain(tmp_path, tensors):
    biases = {f"{n}.bias": torch.randn(tensors[f"{n}.weight"].shape[0]) for n in NAMES if "self_attn" in n}
    save(tmp_path, tensors | biases)
    ours, plain = load(tmp_path, fp8=True, attention_bias=True), load(tmp_path, attention_bias=True)
    assert torch.equal(ours.layers[1].self_attn.qkv_proj.bias, plain.layers[1].self_attn.qkv_proj.bias)
    assert distance(logits(ours), logits(plain)) < 0.15


def test_sizes_that_tensor_cores_cannot_take_are_refused_by_name(tmp_path, tensors):
    names = [f"model.layers.{layer}.mlp" for layer in range(2)]
    odd = {f"{name}.{part}.weight": torch.randn(72, 48) for name in names for part in ("gate_proj", "up_proj")}
    odd |= {f"{name}.down_proj.weight": torch.randn(48, 72) for name in names}
    save(tmp_path, tensors | odd)
    load(tmp_path, intermediate_size=72)
    with pytest.raises(ConfigError, match=r"multiples of 16.* model\.layers\.0\.mlp\.down_proj \[48, 72\]"):
        load(tmp_path, intermediate_size=72, fp8=True)


# An FP8 checkpoint


@pytest.mark.parametrize("fp8", [False, True], ids=["as it is", "with the flag"])
@pytest.mark.parametrize("scale_shape", [(-1, 1), (-1,)])
def test_scales_of_rows_are_kept_with_their_numbers_bit_by_bit(tmp_path, tensors, scale_shape, fp8):
    stored = in_fp8(tensors, row_scales)
    reshaped = {name: stored[name].reshape(scale_shape) for name in stored if name.endswith("_scale")}
    save(tmp_path, stored | reshaped)
    model = load(tmp_path, ROW_WISE, fp8=fp8)
    for name in NAMES:
        weight, scale = weights_of(model, name)
        assert torch.equal(weight.float(), stored[f"{name}.weight"].float())
        assert torch.equal(scale, stored[f"{name}.weight_scale"].flatten())


@pytest.mark.parametrize("quantization", [ONE_SCALE, ROW_WISE], ids=["fp8", "compressed-tensors"])
@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_one_scale_of_a_whole_tensor_serves_all_its_rows(tmp_path, tensors, scale_shape, quantization):
    stored = in_fp8(tensors, one_scale)
    save(tmp_path, stored | {n: stored[n].reshape(scale_shape) for n in stored if n.endswith("_scale")})
    model = load(tmp_path, quantization)
    for name in NAMES:
        weight, scale = weights_of(model, name)
        assert torch.equal(weight.float(), stored[f"{name}.weight"].float())
        assert (scale == stored[f"{name}.weight_scale"]).all()


@pytest.mark.parametrize(
    ("scales_of", "quantization", "rename"),
    [(row_scales, ROW_WISE, dict), (one_scale, ONE_SCALE, dict), (block_scales, BLOCKWISE, as_weight_scale_inv)],
    ids=["rows", "one", "blocks"],
)
def test_logits_are_those_of_the_weights_multiplied_out_by_hand(tmp_path, tensors, scales_of, quantization, rename):
    """And of inputs that are rounded as they come; a last bit may tip a rounding. Blocks are rounded again, to rows."""
    stored = in_fp8(tensors, scales_of)
    by_hand = dict(tensors)
    for name in NAMES:
        weight = stored[f"{name}.weight"].float() * scales_of(tensors[f"{name}.weight"])[1]
        by_hand[f"{name}.weight"] = rounded(weight) if scales_of is block_scales else weight
    for name, content in {"fp8": rename(stored), "by hand": by_hand}.items():
        (tmp_path / name).mkdir()
        save(tmp_path / name, content)
    ours, plain = load(tmp_path / "fp8", quantization), load(tmp_path / "by hand")
    for name in NAMES:
        weight, scale = weights_of(ours, name)
        torch.testing.assert_close(weight.float() * scale[:, None], by_hand[f"{name}.weight"])
    for module in plain.layers.modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(lambda _, args: rounded(args[0]))
    assert distance(logits(ours), logits(plain)) < 0.06


def test_a_scale_may_stand_in_another_file_than_its_weight_and_in_bfloat16(tmp_path, tensors):
    stored = as_weight_scale_inv(in_fp8(tensors, block_scales))
    scales = {name: tensor.bfloat16() for name, tensor in stored.items() if name.endswith("_scale_inv")}
    rest = {name: tensor for name, tensor in stored.items() if name not in scales}
    save_sharded(tmp_path, rest, scales)
    sharded = logits(load(tmp_path, BLOCKWISE))
    for path in tmp_path.glob("model*"):
        path.unlink()
    save(tmp_path, stored | scales)
    assert torch.equal(sharded, logits(load(tmp_path, BLOCKWISE)))


def test_what_the_checkpoint_left_plain_stays_plain_even_with_the_flag(tmp_path, tensors):
    stored = in_fp8(tensors, row_scales)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj"
        stored[f"{name}.weight"] = tensors[f"{name}.weight"]
        del stored[f"{name}.weight_scale"]
    save(tmp_path, stored)
    mlp = load(tmp_path, ROW_WISE, fp8=True).layers[0].mlp
    assert torch.equal(mlp.down_proj.weight, tensors["model.layers.0.mlp.down_proj.weight"])
    assert mlp.gate_up_proj.weight.dtype == FP8


def test_static_scales_of_inputs_and_of_the_cache_are_passed_over(tmp_path, tensors):
    stored = in_fp8(tensors, one_scale)
    stored |= {f"{name}.input_scale": torch.ones(1) for name in NAMES}
    stored |= {f"model.layers.{i}.self_attn.{n}": torch.ones(1) for i in range(2) for n in ("k_scale", "v_scale")}
    save(tmp_path, stored)
    load(tmp_path, ONE_SCALE)


# An FP8 checkpoint that does not fit


def test_a_missing_scale_is_named(tmp_path, tensors):
    stored = in_fp8(tensors, row_scales)
    del stored["model.layers.1.self_attn.k_proj.weight_scale"]
    save(tmp_path, stored)
    with pytest.raises(WeightsError, match=r"1 tensors are missing: model.layers.1.self_attn.k_proj.weight_scale$"):
        load(tmp_path, ROW_WISE)


def test_scales_under_another_forms_name_are_both_missing_and_left_over(tmp_path, tensors):
    save(tmp_path, in_fp8(tensors, block_scales))
    with pytest.raises(WeightsError, match=r"14 .* missing: .*weight_scale_inv.*; 14 .* left over: .*weight_scale,"):
        load(tmp_path, BLOCKWISE)


def test_a_scale_beside_a_plain_weight_is_left_over(tmp_path, tensors):
    stored = in_fp8(tensors, row_scales)
    name = "model.layers.0.self_attn.o_proj"
    save(tmp_path, stored | {f"{name}.weight": tensors[f"{name}.weight"]})
    with pytest.raises(WeightsError, match=f"1 tensors are left over: {name}.weight_scale"):
        load(tmp_path, ROW_WISE)


@pytest.mark.parametrize("shape", [(2, 48), (1, 16), (15, 1), (2,)])
def test_a_scale_of_a_wrong_shape_is_told_with_the_right_ones(tmp_path, tensors, shape):
    stored = in_fp8(tensors, row_scales)
    save(tmp_path, stored | {"model.layers.0.self_attn.k_proj.weight_scale": torch.ones(shape)})
    with pytest.raises(WeightsError) as caught:
        load(tmp_path, ROW_WISE)
    told = f"k_proj.weight_scale is {list(shape)} where config.json says [16, 1] or [16] or [1] or []"
    assert told in str(caught.value)


def test_blocks_of_another_size_than_config_json_says_are_told(tmp_path, tensors):
    save(tmp_path, as_weight_scale_inv(in_fp8(tensors, block_scales)))
    with pytest.raises(WeightsError, match=r"weight_scale_inv is \[3, 3\] where config.json says \[1, 1\]"):
        load(tmp_path, BLOCKWISE | {"weight_block_size": [128, 128]})


def test_embeddings_norms_and_the_head_are_plain(tmp_path, tensors):
    save(tmp_path, in_fp8(tensors, row_scales) | {"lm_head.weight": torch.ones(24, 48).to(FP8)})
    with pytest.raises(WeightsError, match=r"lm_head.weight holds F8_E4M3; only the projections of layers may"):
        load(tmp_path, ROW_WISE)


def test_fp8_without_a_word_in_config_json_is_refused(tmp_path, tensors):
    save(tmp_path, in_fp8(tensors, row_scales))
    with pytest.raises(WeightsError, match=r"holds F8_E4M3; supported are F64, F32, BF16, F16"):
        load(tmp_path)


# Dummy weights, and the GPU


@pytest.mark.parametrize("by", ["flag", "checkpoint"])
def test_dummy_weights_in_8_bits_are_the_plain_ones_quantized(tmp_path, by):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plain = build_model(ModelConfig.from_folder(tmp_path))
    if by == "checkpoint":
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": BLOCKWISE}))
    ours = build_model(ModelConfig.from_folder(tmp_path))
    init_dummy_weights(plain, device="cpu", dtype=torch.float32, seed=1)
    num_bytes = init_dummy_weights(ours, device="cpu", dtype=torch.float32, seed=1, fp8=by == "flag")
    assert num_bytes == sum(parameter.nbytes for parameter in ours.parameters())
    weight, scale = quantize_rows(plain.layers[1].mlp.gate_up_proj.weight)
    assert torch.equal(ours.layers[1].mlp.gate_up_proj.weight.float(), weight.float())
    assert torch.equal(ours.layers[1].mlp.gate_up_proj.weight_scale, scale)
    assert torch.equal(ours.embed_tokens.weight, plain.embed_tokens.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", ["plain", "rows", "blocks"])
def test_logits_of_the_gpu_are_close_to_the_cpus(tmp_path, tensors, stored):
    """Not closer than bfloat16, in which each product leaves the tensor cores."""
    content, quantization = {
        "plain": (tensors, None),
        "rows": (in_fp8(tensors, row_scales), ROW_WISE),
        "blocks": (as_weight_scale_inv(in_fp8(tensors, block_scales)), BLOCKWISE),
    }[stored]
    save(tmp_path, content)
    on_cpu, on_gpu = (load(tmp_path, quantization, fp8=True, device=device) for device in ("cpu", "cuda"))
    assert distance(logits(on_gpu, "cuda"), logits(on_cpu)) < 0.08
