"""README and ARCHITECTURE tell the truth where a machine can check it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "tools/NOTES.md")


@pytest.fixture(scope="module")
def help_text() -> str:
    command = [sys.executable, "-m", "minserve", "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout


def options_of_minserve(text: str) -> set[str]:
    """Options in the README's table, in ARGS, and in the `docker run` line after the image's name."""
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
    arguments = re.findall(r'ARGS="([^"]*)"', text)
    docker = re.findall(r"^docker run .* minserve (.*)$", text, flags=re.MULTILINE)
    return set(re.findall(r"--[a-z][a-z-]+", " ".join([*table, *arguments, *docker])))


def test_every_option_that_the_readme_names_is_in_the_help(help_text: str) -> None:
    named = options_of_minserve((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "--model" in named
    assert named <= set(re.findall(r"--[a-z][a-z-]+", help_text))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_leads_to_a_file(document: str) -> None:
    path = ROOT / document
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_folders_and_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:models|kernels|tests|tools|runner|memory)/\w+(?:\.py)?)`", text)) - {
        "models/yours.py"
    }
    rooms = (ROOT, ROOT / "minserve")
    assert named
    assert sorted(name for name in named if not any((room / name).exists() for room in rooms)) == []
