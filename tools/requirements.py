"""Print the dependencies that pyproject.toml names, one a line: the Dockerfile installs them before the code."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join(project["dependencies"]))
