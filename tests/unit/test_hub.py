"""A model's name leads to a folder, or to an error that says what to do."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minserve.errors import ConfigError
from minserve.weights.hub import resolve_draft, resolve_model, resolve_tokenizer
from tests.unit.hub_stand_in import COMMIT, StandInHub

SERVED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]
NOT_SERVED = [
    "modeling_own.py",
    "pytorch_model.bin",
    "original/model.safetensors",
    "original/model.safetensors.index.json",
    "original/config.json",
    "onnx/additional_chat_templates/other.jinja",
    "consolidated.safetensors",
    "README.md",
]
# Each file's content is its name: the hub's cache keeps equal contents once.
MODEL_FILES = {name: name.encode() for name in SERVED}
OTHER_FILES = {name: name.encode() for name in NOT_SERVED}

# huggingface_hub reads its environment when it is imported, so each environment takes a process.
_RESOLVE = """
import sys
from minserve.errors import ConfigError
from minserve.weights import hub
try:
    options = {"revision": sys.argv[3]} if sys.argv[3] else {}
    print("FOLDER", getattr(hub, sys.argv[1])(sys.argv[2], **options, progress=False))
except ConfigError as error:
    print("ERROR", error)
assert "torch" not in sys.modules
"""


def resolve_elsewhere(home, endpoint, name, *, revision="", call="resolve_model", **environment):
    """What a process with this environment gets: (folder, None) or (None, the error's message)."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    kept |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", _RESOLVE, call, name, revision]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)
    kind, _, rest = done.stdout.strip().partition(" ")
    assert kind in ("FOLDER", "ERROR"), done.stderr
    return (Path(rest), None) if kind == "FOLDER" else (None, rest)


@pytest.fixture
def hub():
    with StandInHub(repos={"org/model": MODEL_FILES | OTHER_FILES}).running() as hub:
        yield hub


def make_folder(path, names=("config.json", "tokenizer.json", "model.safetensors")):
    path.mkdir()
    for name in names:
        (path / name).write_bytes(b"")
    return path


def files_of(folder):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class TestHub:
    def test_a_hub_name_downloads_what_is_served_and_no_code_pickle_or_copy(self, hub, tmp_path):
        folder, error = resolve_elsewhere(tmp_path, hub.url, "org/model")
        assert error is None
        assert files_of(folder) == MODEL_FILES
        assert hub.downloaded() == MODEL_FILES.keys()
        assert folder.is_relative_to(tmp_path)

    def test_a_tokenizer_is_downloaded_without_its_model(self, hub, tmp_path):
        folder, _ = resolve_elsewhere(tmp_path, hub.url, "org/model", call="resolve_tokenizer")
        assert files_of(folder).keys() == {
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
        }

    @pytest.mark.parametrize(
        "files",
        [
            ["config.json", "model.safetensors"],
            ["config.json", "pytorch_model.bin"],
            ["config.json", "pytorch_model-1.bin", "pytorch_model.bin.index.json"],
        ],
        ids=["safetensors", "bin", "shards"],
    )
    def test_a_draft_head_is_downloaded_with_its_pickle_only_if_there_is_nothing_else(self, tmp_path, files):
        others = ["README.md", "modeling_own.py", "optimizer.bin", *(["pytorch_model.bin"] if len(files) == 2 else [])]
        repos = {"org/draft": {name: name.encode() for name in (*files, *others)}}
        with StandInHub(repos=repos).running() as hub:
            folder, _ = resolve_elsewhere(tmp_path, hub.url, "org/draft", call="resolve_draft")
            assert files_of(folder).keys() == set(files)
            offline, _ = resolve_elsewhere(tmp_path, hub.url, "org/draft", call="resolve_draft", HF_HUB_OFFLINE="1")
            assert offline == folder

    def test_what_is_cached_is_found_offline_and_when_the_hub_is_gone(self, hub, tmp_path):
        online, _ = resolve_elsewhere(tmp_path, hub.url, "org/model")
        asked = len(hub.requested)
        offline, _ = resolve_elsewhere(tmp_path, hub.url, "org/model", HF_HUB_OFFLINE="1")
        assert offline == online
        assert len(hub.requested) == asked
        gone, _ = resolve_elsewhere(tmp_path, "http://127.0.0.1:9", "org/model")
        assert gone == online

    def test_a_commit_can_be_named(self, hub, tmp_path):
        folder, _ = resolve_elsewhere(tmp_path, hub.url, "org/model", revision=COMMIT)
        assert folder.name == COMMIT

    def test_an_unknown_revision_is_named(self, hub, tmp_path):
        _, error = resolve_elsewhere(tmp_path, hub.url, "org/model", revision="v9")
        assert "org/model has no revision 'v9'" in error

    def test_an_unknown_model_is_neither_folder_nor_hub_name(self, hub, tmp_path):
        _, error = resolve_elsewhere(tmp_path, hub.url, "org/other")
        assert "org/other is neither a local folder nor a model at" in error
        assert "HF_TOKEN" in error

    def test_a_private_model_needs_hf_token(self, tmp_path):
        with StandInHub(repos={"org/private": MODEL_FILES}, tokens={"org/private": "hf_right"}).running() as hub:
            _, error = resolve_elsewhere(tmp_path, hub.url, "org/private")
            assert "set HF_TOKEN" in error
            folder, _ = resolve_elsewhere(tmp_path, hub.url, "org/private", HF_TOKEN="hf_right")
            assert folder is not None

    def test_a_gated_model_says_where_to_accept_its_terms(self, tmp_path):
        with StandInHub(repos={"org/gated": MODEL_FILES}, gated=frozenset(["org/gated"])).running() as hub:
            _, error = resolve_elsewhere(tmp_path, hub.url, "org/gated")
            assert f"org/gated is gated: accept its terms at {hub.url}/org/gated" in error
            assert "HF_TOKEN" in error

    def test_offline_and_not_cached_says_so(self, hub, tmp_path):
        _, error = resolve_elsewhere(tmp_path, hub.url, "org/model", HF_HUB_OFFLINE="1")
        assert "HF_HUB_OFFLINE" in error
        assert not hub.requested

    def test_no_network_names_the_endpoint(self, tmp_path):
        _, error = resolve_elsewhere(tmp_path, "http://127.0.0.1:9", "org/model")
        assert "could not be downloaded from http://127.0.0.1:9" in error

    def test_a_repository_without_safetensors_says_that_pickles_are_not_loaded(self, tmp_path):
        files = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b""}
        with StandInHub(repos={"org/old": files}).running() as hub:
            _, error = resolve_elsewhere(tmp_path, hub.url, "org/old")
            assert "lacks *.safetensors" in error

    def test_a_full_disk_is_named_with_the_way_out(self, monkeypatch):
        def full_disk(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("minserve.weights.hub.snapshot_download", full_disk)
        with pytest.raises(ConfigError, match=r"the disk is full: org/model .* HF_HOME"):
            resolve_model("org/model", progress=False)


class TestLocal:
    def test_a_folder_is_taken_as_it_is(self, tmp_path):
        folder = make_folder(tmp_path / "model")
        assert resolve_model(str(folder)) == folder
        assert resolve_tokenizer(str(folder)) == folder

    def test_weights_are_not_needed_for_dummy_ones(self, tmp_path):
        folder = make_folder(tmp_path / "model", ["config.json", "tokenizer.json"])
        assert resolve_model(str(folder), need_weights=False) == folder
        with pytest.raises(ConfigError, match=r"lacks \*\.safetensors"):
            resolve_model(str(folder))

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["tokenizer.json", "a.safetensors"], "lacks config.json"),
            (["config.json", "a.safetensors", "tokenizer.model"], "lacks tokenizer.json; SentencePiece"),
            (["config.json", "tokenizer.json", "pytorch_model.bin"], "pickles"),
            (["model.Q4_K_M.gguf"], "name one of them"),
        ],
    )
    def test_what_a_folder_lacks_is_named(self, tmp_path, names, message):
        with pytest.raises(ConfigError, match=message):
            resolve_model(str(make_folder(tmp_path / "model", names)))

    def test_a_folder_of_a_draft_head_needs_a_config_and_weights_of_either_kind(self, tmp_path):
        for weights in ("model.safetensors", "pytorch_model.bin"):
            folder = make_folder(tmp_path / weights, ["config.json", weights])
            assert resolve_draft(str(folder)) == folder
        with pytest.raises(ConfigError, match=r"lacks config\.json"):
            resolve_draft(str(make_folder(tmp_path / "no config", ["model.safetensors"])))
        with pytest.raises(ConfigError, match=r"lacks weights: model\.safetensors, or else pytorch_model\.bin"):
            resolve_draft(str(make_folder(tmp_path / "no weights", ["config.json", "training_args.bin"])))
        with pytest.raises(ConfigError, match=r"no \.gguf file"):
            resolve_draft("draft.gguf")

    @pytest.mark.parametrize(
        "name", ["./model", "../model", "/srv/model", "~/model", "a/b/c", "model/", "a\\b", "m.gguf"]
    )
    def test_a_path_that_does_not_exist_is_not_sent_to_the_hub(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(ConfigError, match="no such model folder or file"):
            resolve_model(name)

    @pytest.mark.parametrize("name", ["a b", "a--b/c", "nul\0byte", "x" * 5000, "org/name:tag"])
    def test_what_cannot_be_a_hub_name_is_refused(self, name):
        with pytest.raises(ConfigError, match="neither a local folder nor a Hugging Face name"):
            resolve_model(name)

    @pytest.mark.parametrize("name", ["", "  "])
    def test_an_empty_name_is_not_the_current_folder(self, name):
        with pytest.raises(ConfigError, match="empty"):
            resolve_model(name)

    def test_a_file_that_is_no_gguf_is_refused(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(ConfigError, match="is a file"):
            resolve_model(str(tmp_path / "model.safetensors"))

    def test_a_revision_of_a_local_folder_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="revision 'main' is for models on the Hugging Face Hub"):
            resolve_model(str(make_folder(tmp_path / "model")), revision="main")
