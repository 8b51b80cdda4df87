"""Every tool runs from any folder, with nothing in the environment that helps it to find its modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SCRIPTS = sorted(path.name for path in TOOLS.glob("*.py") if path.read_text().startswith("#!"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tool_says_how_it_is_used(tmp_path, script):
    if script == "rival_vllm.py":
        pytest.skip("runs where vLLM is")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(TOOLS / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert "usage: " in done.stdout
