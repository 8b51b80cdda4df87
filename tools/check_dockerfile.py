"""Play the Dockerfile's steps where there is no Docker engine: in an empty folder, with an empty environment.

Owns: how each instruction is played. COPY takes what git tracks, RUN runs in a shell in which `python` and `pip` are a
new virtual environment's, and WORKDIR paths lie below a temporary folder. What needs a root of its own (apt-get,
useradd, USER) is printed and left out. Then ENTRYPOINT is started as written and must answer HEALTHCHECK's own command,
and stop on STOPSIGNAL with exit status 0.

    .venv/bin/python tools/check_dockerfile.py            build, start, health check, stop
    .venv/bin/python tools/check_dockerfile.py --no-start build, `minserve --version`
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDS_OWN_ROOT = ("apt-get", "useradd")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(keyword, rest) of each instruction, with continued lines joined and comments left out."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    pending = ""
    for line in lines:
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        keyword, _, rest = pending.partition(" ")
        yield keyword, rest.strip()
        pending = ""


class Build:
    """One play of a Dockerfile below `root`: environment and working folder as they stand after each instruction."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cwd = root
        (root / "home").mkdir()
        venv = root / "usr"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "LANG"}
        self.environment = {**kept, "HOME": str(root / "home"), "PATH": f"{venv / 'bin'}:/usr/bin:/bin"}
        self.exec_form: dict[str, list[str]] = {}
        self.stop_signal = signal.SIGTERM
        self.user = "root"

    def play(self, keyword: str, rest: str) -> None:
        print(f"-- {keyword} {rest}", flush=True)
        if keyword in ("ARG", "ENV"):
            for assignment in shlex.split(rest):
                name, _, value = assignment.partition("=")
                self.environment[name] = value.replace("/home/minserve", self.environment["HOME"])
        elif keyword == "WORKDIR":
            self.cwd = self.root / rest.lstrip("/")
            self.cwd.mkdir(parents=True, exist_ok=True)
        elif keyword == "COPY":
            *sources, target = rest.split()
            self.copy(sources, target)
        elif keyword == "RUN" and any(word in rest for word in NEEDS_OWN_ROOT):
            print("   left out: it needs a root of its own")
        elif keyword == "RUN":
            subprocess.run(["/bin/sh", "-c", rest], cwd=self.cwd, env=self.environment, check=True)
        elif keyword == "HEALTHCHECK":
            self.exec_form[keyword] = json.loads(rest.partition(" CMD ")[2])
        elif keyword == "ENTRYPOINT":
            self.exec_form[keyword] = json.loads(rest)
        elif keyword == "STOPSIGNAL":
            self.stop_signal = signal.Signals[rest]
        elif keyword == "USER":
            self.user = rest
        else:
            assert keyword in ("FROM", "VOLUME", "EXPOSE"), keyword

    def copy(self, sources: list[str], target: str) -> None:
        """Copy tracked files. A folder's contents go into the target; a file takes its name, or goes into "."."""
        for source in sources:
            tracked = subprocess.run(
                ["git", "ls-files", "-z", "--", source], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
            assert tracked, f"COPY {source}: git tracks no such file"
            for name in filter(None, tracked.split("\0")):
                inside = Path(name).relative_to(source) if name != source else None
                base = self.cwd / target
                path = base / inside if inside else base / Path(name).name if target in (".", "./") else base
                path.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-P", ROOT / name, path], check=True)


def start_and_stop(build: Build) -> None:
    """ENTRYPOINT, then HEALTHCHECK's command until it passes, then STOPSIGNAL."""
    entrypoint = build.exec_form["ENTRYPOINT"]
    with subprocess.Popen(entrypoint, cwd=build.cwd, env=build.environment) as server:
        try:
            while subprocess.run(
                build.exec_form["HEALTHCHECK"], env=build.environment, stderr=subprocess.DEVNULL
            ).returncode:
                assert server.poll() is None, f"{entrypoint} ended with {server.returncode}"
                time.sleep(1)
            print("-- healthy", flush=True)
            server.send_signal(build.stop_signal)
            status = server.wait(timeout=60)
        finally:
            server.kill()
    assert status == 0, f"{build.stop_signal.name} ended it with status {status}"
    print(f"-- stopped on {build.stop_signal.name} with status 0")


def main() -> None:
    parser = argparse.ArgumentParser(description="Play the Dockerfile's steps without a Docker engine.")
    parser.add_argument("--no-start", action="store_true", help="build only, then `minserve --version`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="minserve-image-") as root:
        build = Build(Path(root))
        for keyword, rest in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
            build.play(keyword, rest)
        assert build.user != "root", "the image would run as root"
        if args.no_start:
            command = [build.exec_form["ENTRYPOINT"][0], "--version"]
            subprocess.run(command, cwd=build.cwd, env=build.environment, check=True)
        else:
            start_and_stop(build)


if __name__ == "__main__":
    main()
