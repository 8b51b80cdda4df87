"""The wheel: what is a link in the checkout is a real file there, and it works without the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minserve.weights.default_model import DEFAULT_HEAD

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("minserve", "kernels", "models")
HEAD = ("config.json", "model.safetensors", "README.md")


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout's parts, so that no build folder appears in it."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source, cwd=source)
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_module_of_the_checkout(wheel: Path) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "minserve").rglob("*.py")}
    for folder in ("kernels", "models"):
        modules |= {f"minserve/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert packed == modules


@pytest.mark.slow
def test_the_unpacked_wheel_has_the_page(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from minserve.api.page import PATH, read_page; print(PATH, len(read_page().body))"
    )
    path, size = run("-I", "-c", code, tmp_path, cwd=tmp_path).split()
    assert Path(path) == tmp_path / "minserve" / "api" / "page.html"
    assert int(size) == (ROOT / "minserve" / "api" / "page.html").stat().st_size


def test_the_default_models_head_lies_in_the_folder_of_models_and_is_small() -> None:
    assert DEFAULT_HEAD.resolve() == ROOT / "models" / "heads" / "smollm2-135m-eagle3"
    assert (DEFAULT_HEAD / "model.safetensors").stat().st_size <= 16 * 2**20


@pytest.mark.slow
def test_the_unpacked_wheel_finds_the_default_models_head(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from minserve.weights.default_model import find_draft; print(find_draft(None, None))"
    )
    head = Path(run("-I", "-c", code, tmp_path, cwd=tmp_path).strip())
    assert head.is_relative_to(tmp_path)
    assert sorted(path.name for path in head.iterdir()) == sorted(HEAD)
    for name in HEAD:
        assert (head / name).read_bytes() == (DEFAULT_HEAD / name).read_bytes()


@pytest.mark.slow
def test_the_unpacked_wheel_is_imported_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import minserve.kernels, minserve.models.config as config; print(minserve.kernels.__file__, config.__file__)"
    )
    printed = run("-I", "-c", code, tmp_path, cwd=tmp_path)
    assert printed.split() == [
        str(tmp_path / "minserve/kernels/__init__.py"),
        str(tmp_path / "minserve/models/config.py"),
    ]
