"""The command with a model folder that means harm: it does not start, says why in one line, and runs nothing of it."""

import json
import os
import pickle
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.api import tiny

pytestmark = pytest.mark.slow

END_S = 60.0
CODE = "import pathlib; pathlib.Path({canary!r}).touch()"


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.system, (f"touch {self._path}",)


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def weights(folder: Path, header: bytes, length: int | None = None) -> None:
    data = struct.pack("<Q", len(header) if length is None else length) + header + b"\0" * 12
    (folder / "model.safetensors").write_bytes(data)


def pickle_weights(folder, canary):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(canary)))


def index_of_pickles(folder, canary):
    pickle_weights(folder, canary)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')


def code_of_its_own(folder, canary):
    edit(folder / "config.json", architectures=["Evil"], auto_map={"AutoModelForCausalLM": "evil.Evil"})
    (folder / "evil.py").write_text(CODE.format(canary=str(canary)))


def code_for_the_tokenizer(folder, canary):
    edit(folder / "config.json", architectures=["Evil"])
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil")
    (folder / "evil.py").write_text(CODE.format(canary=str(canary)))


def header_beyond_the_file(folder, canary):
    weights(folder, b"{}", 2**63)


def overlapping_tensors(folder, canary):
    tensor = {"dtype": "F32", "shape": [2]}
    header = {"a": tensor | {"data_offsets": [0, 8]}, "b": tensor | {"data_offsets": [4, 12]}}
    weights(folder, json.dumps(header).encode())


def shard_outside(folder, canary):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')


def link_outside(folder, canary):
    (folder / "model.safetensors").symlink_to("/etc/passwd")


def tokenizer_outside(folder, canary):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/passwd")


def pipe(folder, canary):
    os.mkfifo(folder / "model.safetensors")


def config_without_end(folder, canary):
    (folder / "config.json").write_text('{"a":' * 100_000)


def template_that_is_no_template(folder, canary):
    (folder / "chat_template.jinja").write_text("{% for")


FOLDERS = [
    pickle_weights, index_of_pickles, code_of_its_own, code_for_the_tokenizer, header_beyond_the_file,
    overlapping_tensors, shard_outside, link_outside, tokenizer_outside, pipe, config_without_end,
    template_that_is_no_template,
]  # fmt: skip


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_a_folder_that_means_harm_is_refused_in_one_line_and_nothing_of_it_is_run(tmp_path, make):
    folder, canary = tmp_path / "model", tmp_path / "canary"
    folder.mkdir()
    tiny.write_model_folder(folder)
    tiny.write_random_model(folder)
    make(folder, canary)
    command = [sys.executable, "-m", "minserve", "--port", "0", "--device", "cpu", "--model", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    assert ended.returncode == 2, ended.stderr
    assert not canary.exists()
    faults = [line for line in ended.stderr.splitlines() if line.startswith("minserve: ")]
    assert len(faults) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "root:" not in ended.stderr


def test_a_template_that_reaches_for_python_gets_nothing_and_the_server_answers(tmp_path, start_real):
    canary = tmp_path / "canary"
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch %s') }}"
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.write_model_folder(folder, template=reach % canary)
    tiny.write_random_model(folder)
    server = start_real("--model", str(folder), "--load-format", "dummy")
    data = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value as answer:
        assert (answer.status, json.load(answer)["error"]["param"]) == (400, "messages")
    assert not canary.exists()
