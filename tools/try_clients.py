#!/usr/bin/env python3
"""Clients that people have, each against a server: is what they ask for answered as they expect it?

    PYTHONPATH=. tools/try_clients.py                       a server with the default model, all clients
    PYTHONPATH=. tools/try_clients.py openai lm-eval        some of them
    PYTHONPATH=. tools/try_clients.py --url URL --model NAME --tokenizer FOLDER     a server that is there

Each client is installed in an environment of its own, by uv if there is one, in --environments (kept for the next time)
or a folder that goes. guidellm brings torch: UV_CONSTRAINT or PIP_CONSTRAINT may choose its CPU build. No hub is asked
for anything. Prints a table, and what those who failed have said; the status is 1 if one has.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the tests' own servers

from minserve.weights.default_model import DEFAULT_MODEL_NAME, ensure_default_model
from tests.api.real import RealServer

SCRIPTS = Path(__file__).resolve().parent / "clients"
FLAGS = ("--max-num-seqs", "8", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
RUN_S = 900.0
SHOWN_LINES = 25
NUM_REQUESTS = 6


class Target(NamedTuple):
    """What a client is to talk to. tokenizer: a folder; output: one that the client may write to."""

    url: str
    model: str
    tokenizer: Path
    output: Path


class Client(NamedTuple):
    """requirements: as pip takes them. command: what is run, its first word in the environment; check: raises
    AssertionError for results that are not what was asked for."""

    requirements: tuple[str, ...]
    command: Callable[[Target], list[str]]
    check: Callable[[Target], object] = lambda target: None


def talk(name: str) -> Callable[[Target], list[str]]:
    """A script of ours in the client's own words, which checks what it is told."""
    return lambda target: ["python", str(SCRIPTS / f"talk_{name}.py"), target.url, target.model]


def guidellm(target: Target) -> list[str]:
    return [
        *("guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={target.url},model={target.model}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=8"),
        *("--output", f"kind=json,path={target.output / 'guidellm.json'}"),
    ]


def check_guidellm(target: Target) -> None:
    [benchmark] = read_json(target.output / "guidellm.json")["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == NUM_REQUESTS


def aiperf(target: Target) -> list[str]:
    return [
        *("aiperf", "profile", "--url", target.url, "--model", target.model, "--tokenizer", str(target.tokenizer)),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", "2", "--request-count", str(NUM_REQUESTS)),
        *("--synthetic-input-tokens-mean", "48", "--output-tokens-mean", "8", "--num-dataset-entries", "6"),
        *("--artifact-dir", str(target.output / "aiperf"), "--ui", "none", "--no-gpu-telemetry"),
    ]


def check_aiperf(target: Target) -> None:
    results = read_json(target.output / "aiperf" / "profile_export_aiperf.json")
    assert (results["request_count"]["avg"], results["error_summary"]) == (NUM_REQUESTS, [])


def lm_eval(target: Target) -> list[str]:
    """One task that is scored by log-likelihoods, one that is generated; their questions lie beside them."""
    tasks = target.output / "tasks"
    tasks.mkdir(exist_ok=True)
    for path in (SCRIPTS / "lm_eval").glob("*.yaml"):
        text = path.read_text().replace("QUESTIONS", str(path.with_name("questions.jsonl")))
        (tasks / path.name).write_text(text)
    options = f"model={target.model},base_url={target.url}/v1/completions,tokenizer={target.tokenizer},num_concurrent=2"
    return [
        *("lm_eval", "--model", "local-completions", "--model_args", options, "--tasks", "choose,say"),
        *("--include_path", str(tasks), "--output_path", str(target.output / "lm_eval")),
    ]


def check_lm_eval(target: Target) -> None:
    [path] = (target.output / "lm_eval").rglob("results_*.json")
    results = read_json(path)["results"]
    assert results["choose"]["acc,none"] >= 0.5, results  # chance: a third
    assert results["say"]["exact_match,word"] >= 0.5, results


CLIENTS = {
    "openai": Client(("openai==3.57.0",), talk("openai")),
    "litellm": Client(("litellm==1.110.2",), talk("litellm")),
    "langchain-openai": Client(("langchain-openai==1.7.4",), talk("langchain")),
    "guidellm": Client(("guidellm==0.8.1",), guidellm, check_guidellm),
    "aiperf": Client(("aiperf==0.13.0",), aiperf, check_aiperf),
    "lm-eval": Client(("lm-eval[api]==0.4.13", "transformers==5.24.0"), lm_eval, check_lm_eval),
}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def install(client: Client, folder: Path) -> None:
    """An environment with the client. One that is there is taken as it is. Raises CalledProcessError."""
    done = folder / "installed"
    wanted = "\n".join(client.requirements)
    if done.exists() and done.read_text() == wanted:
        return
    uv = shutil.which("uv")
    make = [uv, "venv", "-q", "--clear", str(folder)] if uv else [sys.executable, "-m", "venv", "--clear", str(folder)]
    python = str(folder / "bin" / "python")
    pip = [uv, "pip", "install", "-q", "--python", python] if uv else [python, "-m", "pip", "install", "-q"]
    for command in (make, [*pip, *client.requirements]):
        subprocess.run(command, capture_output=True, text=True, check=True)
    done.write_text(wanted)


def run(client: Client, folder: Path, target: Target) -> str | None:
    """Run a client; what it has said if something is wrong. Raises CalledProcessError if it cannot be installed."""
    install(client, folder)
    program, *arguments = client.command(target)
    # Some ask the hub even for what lies in a folder; aiperf takes a folder for a hub's name when told to be offline.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HOME": str(target.output / "hub")}
    environment.pop("PYTHONPATH", None)
    try:
        ended = subprocess.run(
            [str(folder / "bin" / program), *arguments],
            env=environment,
            cwd=target.output,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=RUN_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        return f"{error}\n{error.stdout}"
    try:
        client.check(target)
    except (AssertionError, KeyError, ValueError, OSError) as error:
        return f"{ended.stdout}\n{type(error).__name__}: {error}"
    return None


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """The URL of a server: the one that is there, or one of our own."""
    if url is not None:
        yield url.rstrip("/")
        return
    own = RealServer(*FLAGS)
    try:
        yield own.url
    finally:
        own.end()
    assert not own.faults, own.faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; all by default")
    parser.add_argument("--url", help="a server that is there")
    parser.add_argument("--model", default=DEFAULT_MODEL_NAME, help="the name that it serves")
    parser.add_argument("--tokenizer", type=Path, help="a folder with its tokenizer")
    parser.add_argument("--environments", type=Path, help="where to keep them")
    args = parser.parse_args()
    if unknown := [name for name in args.clients if name not in CLIENTS]:
        parser.error(f"no client {unknown[0]!r}; there are {', '.join(CLIENTS)}")
    num_failed = 0
    with tempfile.TemporaryDirectory() as scratch, server(args.url) as url:
        tokenizer = args.tokenizer or ensure_default_model()
        for name in args.clients or CLIENTS:
            output = Path(scratch, "output", name)
            output.mkdir(parents=True)
            begin = time.perf_counter()
            folder = (args.environments or Path(scratch)).resolve() / name
            try:
                said = run(CLIENTS[name], folder, Target(url, args.model, tokenizer, output))
            except subprocess.CalledProcessError as error:
                said = f"{error}\n{error.stdout or ''}{error.stderr or ''}"
            num_failed += said is not None
            verdict = "passed" if said is None else "FAILED"
            pinned = " ".join(CLIENTS[name].requirements)
            print(f"{name:17} {verdict}  {time.perf_counter() - begin:6.0f} s  {pinned}", flush=True)
            if said is not None:
                print("\n".join(f"    {line}" for line in said.splitlines()[-SHOWN_LINES:]), flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
