"""The files of a draft head are read, and refused where they are damaged, hostile or not whole."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from minserve.errors import WeightsError
from tests.unit.eagle3_heads import HeadOnDisk, assert_refused, change_config, load, write

# Files


@pytest.mark.parametrize("family", ["EAGLE", "NVIDIA ModelOpt"])
def test_every_tensor_reaches_its_place(tmp_path, family):
    parts = ("lm_head", "d2t", "embed_tokens", "attention_bias", "mlp_bias", "fc_bias", "qk_norm", "fc_norm")
    written = write(tmp_path, family, parts)
    loaded = load(tmp_path).checkpoint_tensors()
    assert loaded.keys() == written.tensors.keys() - {"d2t"}
    assert all(torch.equal(loaded[name], written.tensors[name]) for name in loaded)


@pytest.mark.parametrize("old_form", [False, True])
def test_a_bin_file_of_either_form_is_read(tmp_path, old_form):
    written = write(tmp_path, "EAGLE")
    torch.save(written.stored(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_form)
    assert torch.equal(load(tmp_path).fc.weight, written.tensors["fc.weight"])


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_shards_are_read_like_one_file(tmp_path, suffix):
    written = write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    stored, weight_map = written.stored(), {}
    base = "pytorch_model" if suffix == ".bin" else "model"
    for number, names in enumerate((sorted(stored)[::2], sorted(stored)[1::2])):
        name = f"{base}-{number}{suffix}"
        shard = {tensor: stored[tensor] for tensor in names}
        torch.save(shard, tmp_path / name) if suffix == ".bin" else save_file(shard, tmp_path / name)
        weight_map |= dict.fromkeys(names, name)
    (tmp_path / f"{base}{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load(tmp_path).checkpoint_tensors()
    assert all(torch.equal(loaded[name], written.tensors[name]) for name in loaded)


def test_safetensors_come_before_a_pickle(tmp_path):
    write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    load(tmp_path)


class _Attack:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_that_would_run_something_is_refused_and_does_not(tmp_path, archive, capsys):
    write(tmp_path, "EAGLE")
    path = tmp_path / "pytorch_model.bin"
    if archive:
        torch.save({"fc.weight": _Attack()}, path)
    else:
        path.write_bytes(pickle.dumps({"fc.weight": _Attack()}))
    assert_refused(tmp_path, "pytorch_model.bin: not a file of tensors alone", error=WeightsError)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a pickle"])
def test_a_damaged_bin_file_is_refused(tmp_path, content):
    write(tmp_path, "EAGLE")
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert_refused(tmp_path, "pytorch_model.bin: not a file of tensors alone", error=WeightsError)


@pytest.mark.parametrize("content", [[torch.ones(1)], {"fc.weight": 1}, {1: torch.ones(1)}], ids=str)
def test_a_bin_file_of_other_things_than_tensors_is_refused(tmp_path, content):
    write(tmp_path, "EAGLE")
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert_refused(tmp_path, "not an object of plain tensors by name", error=WeightsError)


def test_a_damaged_safetensors_file_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    assert_refused(tmp_path, "model.safetensors: not a safetensors file", error=WeightsError)


def test_a_folder_without_weights_says_what_is_there_instead(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "draft.safetensors")
    assert_refused(tmp_path, "there is no model.safetensors", "only draft.safetensors", error=WeightsError)


# Names


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.hidden_norm.weight", "layers.0.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    write(tmp_path, without=[name])
    assert_refused(tmp_path, f"1 tensors are missing: {name}", error=WeightsError)


@pytest.mark.parametrize(
    "name", ["mask_hidden", "layers.0.mlp.gate.weight", "fc_norm.2.weight", "input_norms.weight", "fc.scale"]
)
def test_a_tensor_that_is_left_over_is_named(tmp_path, name):
    write(tmp_path, tensors={name: torch.ones(3)})
    assert_refused(tmp_path, f"1 tensors are left over: {name}", error=WeightsError)


def test_one_bias_asks_for_all_of_them(tmp_path):
    write(tmp_path, tensors={"layers.0.self_attn.q_proj.bias": torch.ones(24)})
    assert_refused(tmp_path, "3 tensors are missing: layers.0.self_attn.k_proj.bias", error=WeightsError)


def test_stored_rope_frequencies_are_passed_over(tmp_path):
    write(tmp_path, tensors={"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})
    load(tmp_path)


def test_all_names_may_begin_with_model(tmp_path):
    head = HeadOnDisk("SpecForge")
    stored = head.stored()
    head.stored = lambda: {f"model.{name}": tensor for name, tensor in stored.items()}
    head.write(tmp_path)
    assert torch.equal(load(tmp_path).norm.weight, head.tensors["norm.weight"])


def test_two_names_for_one_part_are_refused(tmp_path):
    write(tmp_path, tensors={"model.fc.weight": torch.ones(16, 48)})
    assert_refused(tmp_path, "fc.weight and model.fc.weight are the same part", error=WeightsError)


def test_a_file_without_a_layer_is_no_head(tmp_path):
    head = write(tmp_path)
    write(tmp_path, without=[name for name in head.tensors if name.startswith("layers.")])
    assert_refused(tmp_path, "no EAGLE-3 head", error=WeightsError)


def test_a_config_that_counts_other_layers_than_there_are_is_refused(tmp_path):
    write(tmp_path, "NVIDIA ModelOpt", num_hidden_layers=2)
    assert_refused(tmp_path, "num_hidden_layers is 2; it must be 1")


def test_an_eagle_config_may_count_the_layers_of_the_target(tmp_path):
    write(tmp_path, "EAGLE", num_hidden_layers=40)
    assert load(tmp_path).num_layers == 1


def test_a_gap_in_the_layers_is_refused(tmp_path):
    head = HeadOnDisk("NVIDIA ModelOpt", sizes={"num_hidden_layers": 3})
    gap = [name for name in head.tensors if name.startswith("layers.1.")]
    head.tensors = {name: tensor for name, tensor in head.tensors.items() if name not in gap}
    head.write(tmp_path)
    change_config(tmp_path, num_hidden_layers=2)
    assert_refused(tmp_path, "layers [0, 2], not of 0 to 2", error=WeightsError)
