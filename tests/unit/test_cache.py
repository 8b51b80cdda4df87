"""A cached folder is whole or not there, whoever builds it and however that ends."""

import errno
import threading
from pathlib import Path

import pytest

from minserve.errors import ConfigError
from minserve.weights import gguf as gguf_module
from minserve.weights.cache import built_once, cache_root
from minserve.weights.gguf import converted_folder
from minserve.weights.hub import resolve_model
from tests.unit.gguf_files import tiny_model, write_gguf


def names_in(folder):
    return {path.name for path in folder.iterdir()}


class TestBuiltOnce:
    def test_it_is_built_the_first_time_only(self, tmp_path):
        built = []

        def build(folder):
            built.append(folder)
            (folder / "file").write_text("content")

        for _ in range(2):
            assert built_once(tmp_path / "a" / "b", build) == tmp_path / "a" / "b"
        assert len(built) == 1
        assert (tmp_path / "a" / "b" / "file").read_text() == "content"

    @pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
    def test_an_interrupted_build_leaves_nothing(self, tmp_path, error):
        def build(folder):
            (folder / "half").write_text("made")
            raise error

        with pytest.raises(error):
            built_once(tmp_path / "b", build)
        assert names_in(tmp_path) == {"b.lock"}

    def test_what_a_killed_process_left_is_not_built_upon(self, tmp_path):
        (tmp_path / "b.part").mkdir()
        (tmp_path / "b.part" / "half").write_text("made")
        built_once(tmp_path / "b", lambda folder: (folder / "whole").touch())
        assert names_in(tmp_path) == {"b", "b.lock"}
        assert names_in(tmp_path / "b") == {"whole"}

    def test_of_two_at_once_one_builds_and_the_other_waits_for_it(self, tmp_path):
        building, may_finish, built = threading.Event(), threading.Event(), []

        def build(folder):
            built.append(folder)
            building.set()
            assert may_finish.wait(timeout=30)
            (folder / "file").touch()

        def second():
            may_finish.set()
            built_once(tmp_path / "b", build)

        threads = [threading.Thread(target=built_once, args=(tmp_path / "b", build)), threading.Thread(target=second)]
        threads[0].start()
        assert building.wait(timeout=30)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert len(built) == 1
        assert names_in(tmp_path / "b") == {"file"}

    def test_a_full_disk_is_named_with_the_way_out(self, tmp_path):
        def build(folder):
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(ConfigError, match=r"the disk is full.*XDG_CACHE_HOME"):
            built_once(tmp_path / "b", build)
        assert names_in(tmp_path) == {"b.lock"}

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="could not be written"):
            built_once(tmp_path / "file" / "b", lambda folder: None)


class TestCacheRoot:
    def test_it_follows_xdg_cache_home(self, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert cache_root() == Path("/elsewhere/minserve")

    @pytest.mark.parametrize("value", ["", "relative/path"])
    def test_it_is_in_the_home_folder_otherwise(self, monkeypatch, value):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", "/home/someone")
        assert cache_root() == Path("/home/someone/.cache/minserve")


class TestConvertedGGUF:
    @pytest.fixture
    def path(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return write_gguf(tmp_path / "tiny-Q8.gguf", tiny_model("llama"))

    def test_a_gguf_file_is_a_model_and_is_converted_once(self, path, monkeypatch):
        folder = resolve_model(str(path), progress=False)
        assert folder.name == "tiny-Q8"
        assert folder.is_relative_to(path.parent / "cache" / "minserve")
        monkeypatch.setattr(gguf_module, "convert_gguf", None)
        assert resolve_model(str(path), progress=False) == folder

    def test_another_file_under_the_same_name_is_converted_again(self, path):
        first = converted_folder(path, progress=False)
        write_gguf(path, tiny_model("qwen3"))
        assert converted_folder(path, progress=False) != first

    def test_another_version_of_the_converter_converts_again(self, path, monkeypatch):
        first = converted_folder(path, progress=False)
        monkeypatch.setattr(gguf_module, "CONVERTER_VERSION", gguf_module.CONVERTER_VERSION + 1)
        assert converted_folder(path, progress=False) != first

    def test_a_broken_file_leaves_nothing_behind(self, path):
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ConfigError, match="is the download complete"):
            resolve_model(str(path), progress=False)
        assert not list((path.parent / "cache").rglob("*.safetensors"))
        assert not list((path.parent / "cache").rglob("*.part"))
