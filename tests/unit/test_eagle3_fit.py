"""A draft head is understood, and refused where it does not fit its target, with both sizes."""

import json

import pytest
import torch

from minserve.errors import WeightsError
from tests.unit.eagle3_heads import IDS, VOCAB, HeadOnDisk, assert_refused, change_config, load, make_target, write

# Sizes


def test_states_of_another_size_are_refused_with_both(tmp_path):
    write(tmp_path)
    assert_refused(tmp_path, "states of 16 numbers", "hidden size is 20", target=make_target(hidden_size=20).config)
    change_config(tmp_path, target_hidden_size=24)
    assert_refused(tmp_path, "states of 24 numbers", "hidden size is 16")


def test_another_vocabulary_is_refused_with_both(tmp_path):
    write(tmp_path)
    assert_refused(tmp_path, "for 40 tokens; the target has 44", target=make_target(vocab_size=44).config)


@pytest.mark.parametrize(("parts", "lacks"), [(("lm_head", "d2t"), "embed_tokens"), (("embed_tokens",), "lm_head")])
def test_a_head_of_another_size_must_bring_what_it_cannot_share(tmp_path, parts, lacks):
    HeadOnDisk("SpecForge", frozenset(parts), target_hidden=20, extra={"target_hidden_size": 20}).write(tmp_path)
    target = make_target(hidden_size=20).config
    assert_refused(tmp_path, f"no {lacks} of its own", "rows of 20", "hidden size is 16", target=target)


def test_a_wrong_shape_is_told_with_the_right_one(tmp_path):
    write(tmp_path, tensors={"layers.0.self_attn.q_proj.weight": torch.ones(24, 16)})
    assert_refused(tmp_path, "layers.0.self_attn.q_proj.weight is [24, 16] where config.json says [24, 32]")


def test_weights_that_are_whole_numbers_are_refused(tmp_path):
    write(tmp_path, tensors={"norm.weight": torch.ones(16, dtype=torch.int8)})
    assert_refused(tmp_path, "norm.weight holds torch.int8", error=WeightsError)


# Vocabulary


@pytest.mark.parametrize(("offset", "reached"), [(-1, "-1"), (VOCAB, "40")])
def test_d2t_that_leads_out_of_the_vocabulary_is_refused(tmp_path, offset, reached):
    offsets = torch.zeros(12, dtype=torch.int64)
    offsets[0] = offset
    write(tmp_path, parts=("lm_head", "d2t"), tensors={"d2t": offsets})
    assert_refused(tmp_path, f"d2t leads to token {reached}", "0 to 39", error=WeightsError)


def test_t2d_must_name_the_tokens_of_d2t(tmp_path):
    """Tokens instead of offsets may stay within the vocabulary; t2d shows them."""
    write(tmp_path, tensors={"d2t": torch.arange(12)})
    assert_refused(tmp_path, "t2d and d2t do not name the same tokens", error=WeightsError)


@pytest.mark.parametrize(("name", "length"), [("d2t", 11), ("t2d", 41)])
def test_vocabulary_tables_of_another_length_are_refused_with_both(tmp_path, name, length):
    write(tmp_path, tensors={name: torch.zeros(length, dtype=torch.int64)})
    expected = {"d2t": 12, "t2d": 40}[name]
    assert_refused(tmp_path, f"{name} is [{length}]", f"must be [{expected}]", error=WeightsError)


def test_fewer_tokens_without_d2t_are_refused(tmp_path):
    write(tmp_path, without=("d2t", "t2d"))
    assert_refused(tmp_path, "d2t is missing", "12 of 40 tokens", error=WeightsError)


def test_a_config_need_not_count_the_drafts_tokens(tmp_path):
    write(tmp_path, draft_vocab_size=None)
    assert load(tmp_path).config.draft_vocab_size == 12


def test_more_tokens_than_the_target_has_are_refused(tmp_path):
    write(tmp_path, draft_vocab_size=41)
    assert_refused(tmp_path, "draft_vocab_size is 41; it must be at most 40")


# Layers of the target


@pytest.mark.parametrize(("num_layers", "layers"), [(8, (2, 4, 5)), (30, (2, 15, 27)), (36, (2, 18, 33))])
def test_without_ids_the_layers_follow_from_their_number(tmp_path, num_layers, layers):
    write(tmp_path, "EAGLE")
    assert load(tmp_path, make_target(num_layers=num_layers).config).config.aux_layers == layers


def test_of_few_layers_three_must_be_named(tmp_path):
    write(tmp_path, "EAGLE")
    few = make_target(num_layers=4).config
    assert_refused(tmp_path, f"{IDS} is missing", "4 are too few", target=few)
    change_config(tmp_path, **{IDS: [1, 2, 4]})
    assert load(tmp_path, few).config.aux_layers == (1, 2, 4)


def test_ids_in_eagle_config_say_what_layers_put_out(tmp_path):
    write(tmp_path, eagle_config={IDS: [1, 3, 7]})
    assert load(tmp_path).config.aux_layers == (2, 4, 8)


def test_an_empty_list_of_ids_is_none(tmp_path):
    write(tmp_path, eagle_config={IDS: []})
    assert load(tmp_path).config.aux_layers == (2, 4, 5)


def test_ids_in_both_places_must_mean_the_same(tmp_path):
    write(tmp_path, eagle_config={IDS: [1, 3, 7]}, **{IDS: [2, 4, 8]})
    assert load(tmp_path).config.aux_layers == (2, 4, 8)
    change_config(tmp_path, **{IDS: [1, 3, 7]})
    assert_refused(tmp_path, f"{IDS} is [1, 3, 7]", "[2, 4, 8]")


@pytest.mark.parametrize("ids", [[1, 2], [1, 2, 3, 4], [1, 1, 2], [3, 2, 1], [1, 2, 9], [-1, 2, 3], ["1", 2, 3], 5])
def test_ids_must_be_three_layers_of_the_target(tmp_path, ids):
    write(tmp_path, **{IDS: ids})
    assert_refused(tmp_path, f"{IDS} is {json.dumps(ids)}", "ascending, from 0 to 8")


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("aux_hidden_state_layer_ids", [1, 2, 3], None),
        ("num_aux_hidden_states", 4, None),
        ("use_aux_hidden_state", False, "eagle_config"),
        ("eagle_aux_layer_bands", [[1], [2]], "eagle_config"),
    ],
)
def test_other_ways_to_choose_states_are_refused_by_name(tmp_path, field, value, place):
    write(tmp_path, **({field: value} if place is None else {place: {field: value}}))
    assert_refused(tmp_path, field)


# Fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["Eagle3DeepseekV2ForCausalLM"]),
        ("speculators_model_type", "dflash"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"rope_type": "longrope"}),
        ("logit_scale", 0.5),
        ("num_key_value_heads", 3),
        ("eagle_config", [1]),
        ("norm_output", "yes"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, field, value):
    write(tmp_path)
    change_config(tmp_path, **{field: value})
    if field == "speculators_model_type":
        change_config(tmp_path, transformer_layer_config=HeadOnDisk("SpecForge").sizes)
    assert_refused(tmp_path, "rope_type" if field == "rope_scaling" else field)


@pytest.mark.parametrize("place", [None, "eagle_config"])
@pytest.mark.parametrize(("flag", "part"), [("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm")])
def test_a_flag_that_contradicts_the_tensors_is_refused(tmp_path, flag, part, place):
    """NVIDIA writes norm_before_fc into eagle_config, where others look it up in vain: the tensors decide."""
    write(tmp_path, **({flag: True} if place is None else {place: {flag: True}}))
    assert_refused(tmp_path, f"{flag} is true; it must be false, as the head's tensors say")
    write(tmp_path, parts=("lm_head", "d2t", part), **({flag: False} if place is None else {place: {flag: False}}))
    assert_refused(tmp_path, f"{flag} is false; it must be true, as the head's tensors say")
    write(tmp_path, parts=("lm_head", "d2t", part), eagle_config={})
    assert getattr(load(tmp_path).config, flag)


def test_a_qwen3_layer_must_have_its_norms(tmp_path):
    write(tmp_path, model_type="qwen3")
    assert_refused(tmp_path, "q_norm.weight is missing", error=WeightsError)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, None),
        ({"sliding_window": 6}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"layer_types": ["full_attention"], "sliding_window": 6}, None),
        ({"layer_types": ["sliding_attention"], "sliding_window": 6}, 6),
        ({"use_sliding_window": True, "sliding_window": 6}, 6),
    ],
    ids=str,
)
def test_the_window_of_its_training_is_found(tmp_path, fields, window):
    write(tmp_path, **fields)
    assert load(tmp_path).config.window == window


@pytest.mark.parametrize("kinds", [["full_attention", "sliding_attention"], ["chunked_attention"], "full", 3], ids=str)
def test_other_kinds_of_attention_are_refused(tmp_path, kinds):
    write(tmp_path, layer_types=kinds)
    assert_refused(tmp_path, "layer_types")


# The log


def test_a_head_says_what_was_found(tmp_path):
    write(tmp_path)
    assert load(tmp_path).describe() == (
        "EAGLE-3 head (SpecForge): 1 layer, hidden 16, 12 of 40 tokens, aux layers 2, 4, 5, rope default 500"
    )
    parts = frozenset(("d2t", "embed_tokens", "qk_norm", "input_norm"))
    extra = {"norm_before_residual": True, "norm_output": True, "tie_word_embeddings": True}
    HeadOnDisk("speculators", parts, sizes={"num_hidden_layers": 2}, extra=extra).write(tmp_path)
    assert load(tmp_path).describe() == (
        "EAGLE-3 head (speculators): 2 layers, hidden 16, 12 of 40 tokens, aux layers 1, 4, 8, rope default 700, "
        "norm_before_fc, norm_before_residual, norm_output, qk_norm, own embedding, tied lm_head"
    )
