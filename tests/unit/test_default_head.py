"""The draft head of the default model: when the command uses it."""

import pytest

from minserve.cli import main
from tests.api.tiny import write_model_folder


@pytest.fixture
def engine_config_for(tmp_path, monkeypatch):
    """engine_config_for(*argv) -> what the command would start its engine with. The default model and its head are
    folders of ours."""
    model, head = tmp_path / "model", tmp_path / "own-head"
    model.mkdir()
    head.mkdir()
    write_model_folder(model)
    monkeypatch.setattr("minserve.weights.default_model.ensure_default_model", lambda: model)
    monkeypatch.setattr("minserve.weights.default_model.DEFAULT_HEAD", head)
    started = []

    async def launch(server_config, engine_config, *_):
        started.append(engine_config)
        return 0

    monkeypatch.setattr("minserve.api.launch.launch", launch)

    def config(*argv):
        assert main(["--port", "0", *argv]) == 0
        return started.pop()

    return config


def test_the_default_model_has_its_own_draft_head_unless_another_or_none_is_named(tmp_path, engine_config_for):
    assert engine_config_for().draft_path == str(tmp_path / "own-head")
    assert engine_config_for().num_draft_tokens is None
    assert engine_config_for("--draft", "none").draft_path is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").touch()
    (other / "model.safetensors").touch()
    assert engine_config_for("--draft", str(other)).draft_path == str(other)


def test_another_model_has_no_draft_head_unless_one_is_named(tmp_path, engine_config_for):
    assert engine_config_for("--model", str(tmp_path / "model"), "--load-format", "dummy").draft_path is None


def test_without_its_head_the_default_model_is_served_without_drafts(tmp_path, engine_config_for):
    (tmp_path / "own-head").rmdir()
    assert engine_config_for().draft_path is None
