"""What may be imported where: the API side starts without torch, and no module exists twice."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "module",
    [
        "minserve",
        "minserve.api",
        "minserve.cli",
        "minserve.engine.client",
        "minserve.engine.plan",
        "minserve.engine.scheduler",
        "minserve.memory.blocks",
        "minserve.models.config",
        "minserve.models.eagle3_config",
        "minserve.text",
    ],
)
def test_importing_it_leaves_torch_out(module: str) -> None:
    """Every submodule counts: a package with an empty __init__ would otherwise prove nothing."""
    code = f"""
import importlib, pkgutil, sys
module = importlib.import_module({module!r})
if {module!r} in ("minserve.api", "minserve.text"):
    for info in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        importlib.import_module(info.name)
assert "torch" not in sys.modules, "torch was imported"
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["kernels", "models"])
def test_the_linked_folders_are_imported_only_as_parts_of_minserve(name: str) -> None:
    result = run_python(f"import {name}")
    assert result.returncode == 1
    assert f"ImportError: import minserve.{name}, not {name}" in result.stderr
