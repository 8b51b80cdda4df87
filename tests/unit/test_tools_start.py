"""Every tool runs from any folder, with nothing in the environment that helps it to find its modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NO_FLAGS = {"requirements.py", "size.py"}
SCRIPTS = sorted(path.name for path in TOOLS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - NO_FLAGS))
def test_a_tool_says_how_it_is_used(tmp_path, script):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(TOOLS / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert "usage: " in done.stdout
