"""Folders that mean harm or are broken: nothing outside is read, nothing is run, and the error names the file."""

import json
import os
import struct

import pytest
from safetensors.torch import save_file

from minserve.errors import WeightsError
from tests.unit.checkpoints import load, random_tensors, save, save_sharded


@pytest.fixture
def tensors():
    return random_tensors()


def write_raw(path, header, data=b"", length=None):
    """A safetensors file, byte by byte: the header's length, the header, the data."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


@pytest.mark.parametrize(
    "name",
    ["../evil.safetensors", "/tmp/evil.safetensors", "a/../../evil.safetensors", "..\\evil.safetensors", ""],
)
def test_an_index_may_not_lead_outside_the_folder(tmp_path, tensors, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, tmp_path / "evil.safetensors")
    save_sharded(folder, weight_map=dict.fromkeys(tensors, name))
    with pytest.raises(WeightsError, match=r"outside the model folder|only .safetensors"):
        load(folder)


@pytest.mark.parametrize("target", ["../evil.safetensors", "../link"])
def test_a_link_may_not_lead_outside_the_folder(tmp_path, tensors, target):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, tmp_path / "evil.safetensors")
    (tmp_path / "link").symlink_to("evil.safetensors")
    (folder / "model.safetensors").symlink_to(target)
    with pytest.raises(WeightsError, match="outside the model folder"):
        load(folder)


def test_a_link_within_the_folder_is_followed(tmp_path, tensors):
    (tmp_path / "real").mkdir()
    save(tmp_path / "real", tensors)
    (tmp_path / "model.safetensors").symlink_to("real/model.safetensors")
    load(tmp_path)


def hub_snapshot(cache, repo):
    snapshot = cache / repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / repo / "blobs").mkdir()
    return snapshot


def test_the_hubs_cache_links_to_its_own_blobs(tmp_path, tensors):
    snapshot = hub_snapshot(tmp_path, "models--org--name")
    save_file(tensors, tmp_path / "models--org--name" / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    load(snapshot)
    (tmp_path / "shortcut").symlink_to(snapshot)
    load(tmp_path / "shortcut")


def test_the_hubs_cache_may_not_link_to_another_models_blobs(tmp_path, tensors):
    snapshot = hub_snapshot(tmp_path, "models--org--name")
    hub_snapshot(tmp_path, "models--org--other")
    save_file(tensors, tmp_path / "models--org--other" / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../../models--org--other/blobs/0123")
    with pytest.raises(WeightsError, match="outside the model folder"):
        load(snapshot)


def test_a_broken_link_and_a_loop_of_links_are_refused(tmp_path, tensors):
    save_sharded(tmp_path, weight_map={"a": "gone.safetensors"})
    (tmp_path / "gone.safetensors").symlink_to("nowhere")
    with pytest.raises(WeightsError, match=r"no file 'gone.safetensors'"):
        load(tmp_path)
    (tmp_path / "gone.safetensors").unlink()
    (tmp_path / "gone.safetensors").symlink_to("gone.safetensors")
    with pytest.raises(WeightsError, match=r"no file 'gone.safetensors'"):
        load(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="not a regular file"):
        load(tmp_path)


F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (b"", b"", 0),
        (b'{"a":', b"", 200),
        (b"{}", b"", 2**62),
        (b"{}", b"", 100_000_001),
        (b"\xff\xfe\xff", b"", None),
        (b"[]", b"", None),
        ({"a": F32 | {"data_offsets": [0, 8]}}, b"\0" * 4, None),
        ({"a": F32 | {"data_offsets": [0, 8]}}, b"\0" * 12, None),
        ({"a": F32 | {"data_offsets": [8, 0]}}, b"\0" * 8, None),
        ({"a": F32 | {"data_offsets": [0, 4]}}, b"\0" * 4, None),
        ({"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [4, 12]}}, b"\0" * 12, None),
        ({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, b"\0" * 8, None),
        ({"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8, None),
    ],
    ids=[
        "empty header",
        "truncated header",
        "huge header",
        "header over the limit",
        "not UTF-8",
        "not an object",
        "truncated data",
        "data left over",
        "offsets backwards",
        "offsets against shape",
        "overlapping offsets",
        "shape overflows",
        "unknown dtype",
    ],
)
def test_a_malformed_file_is_refused_by_path(tmp_path, header, data, length):
    write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(WeightsError, match=r"model.safetensors: not a safetensors file"):
        load(tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(WeightsError, match="not a safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_a_malformed_index_is_refused_by_path(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"model.safetensors.index.json"):
        load(tmp_path)


def test_an_index_that_names_pickle_files_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    save_sharded(tmp_path, weight_map={"model.norm.weight": "pytorch_model.bin"})
    with pytest.raises(WeightsError, match=r"only .safetensors files are read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("present", "told"),
    [
        ("pytorch_model.bin", "only pytorch_model.bin: pickle files can run code and are not read"),
        ("model.pt", "only model.pt: pickle"),
        ("model-Q4_0.gguf", "only model-Q4_0.gguf"),
        ("README.md", "there is no model.safetensors or model.safetensors.index.json"),
    ],
)
def test_a_folder_without_safetensors_is_refused_with_what_it_has(tmp_path, present, told):
    (tmp_path / present).touch()
    with pytest.raises(WeightsError, match=told):
        load(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="no such folder"):
        load(tmp_path / "gone")
