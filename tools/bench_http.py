"""Streaming over HTTP: N clients at once in several processes, against a server that this command starts, or --url.

    python tools/bench_http.py --work 256x1024x257 --against-engine
    python tools/bench_http.py --config tiny --device cpu --work 4x32x16 --against-engine
    python tools/bench_http.py --url http://127.0.0.1:8000 --work 64x1024

All requests of a work are sent at one moment, each on its own connection: random token ids to /v1/completions, greedy,
never ended early. With --against-engine the same works run first on the engine alone, in a process of its own, and the
ratio is printed. A stream that fails, or brings another number of tokens than asked for, ends the command with its
message and a status of 1. With OUT set, every figure is also a line in $OUT/bench_http.json.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from http_clients import Clients, StreamError
from streams import Figures, Stream
from workload import (
    ChildError,
    Work,
    add_flags,
    as_flags,
    engine_options,
    parse,
    record,
    report,
    reports,
    side_flags,
    vocab_size_of,
    warm_up_of,
    write_config,
    write_tokenizer,
)

from minserve.errors import MinserveError

if TYPE_CHECKING:
    from minserve.engine.core import Engine

END_S = 60.0
LOG_LINES = 40
HEADER = "requests x context x new           tok/s   TTFT ms p50       p95   gap ms p50     p95     p99   tok/event"


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[str]:
    """`python -m minserve` with random weights on a free port: its URL. If the caller fails, its log's end is printed.

    Raises ChildError, with all that it has said, if it does not start.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, args.config)
        write_tokenizer(folder, vocab_size_of(args))
        command = [sys.executable, "-m", "minserve", "--model", name, "--load-format", "dummy", "--port", "0"]
        options = {"device": args.device, "no_enable_prefix_caching": True, **engine_options(args)}
        log = folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen([*command, *as_flags(options)], stderr=file)
        try:
            yield _url_when_ready(process, log)
        except StreamError:
            sys.stderr.writelines(log.read_text().splitlines(keepends=True)[-LOG_LINES:])
            raise
        finally:
            _end(process)


def _url_when_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    while not (match := re.search(r"ready at (http://\S+)", log.read_text())):
        if process.poll() is not None:
            raise ChildError(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.1)
    return match[1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def engine_streams(engine: "Engine", prompts: list[list[int]], new_tokens: int) -> list[Stream]:
    """The same requests on an engine of this process; an event is a delta with tokens."""
    from bench_engine import submit

    sent_s = time.monotonic()
    submit(engine, prompts, new_tokens)
    events_s: list[list[float]] = [[] for _ in prompts]
    num_tokens = [0] * len(prompts)
    while engine.has_work:
        for delta in engine.step().deltas:
            if delta.token_ids:
                events_s[int(delta.request_id)].append(time.monotonic())
                num_tokens[int(delta.request_id)] += len(delta.token_ids)
    return [Stream(sent_s, events, num) for events, num in zip(events_s, num_tokens, strict=True)]


def run_engine(args: argparse.Namespace) -> None:
    """Report the figures of the engine alone: what --against-engine starts."""
    from bench_engine import build

    engine = build(args)
    for work in args.work:
        warm_up = warm_up_of(work, args)
        engine_streams(engine, warm_up.prompts(vocab_size_of(args), seed=0), warm_up.new_tokens)
        streams = engine_streams(engine, work.prompts(vocab_size_of(args), seed=1), work.new_tokens)
        report(work=work, figures=Figures.of(streams))


def engine_figures(args: argparse.Namespace) -> dict[Work, Figures]:
    """The figures of the engine alone, from a process that has ended when this returns."""
    command = [sys.executable, __file__, "--engine-only", "--device", args.device, *side_flags(args)]
    return {Work(*fields["work"]): Figures(*fields["figures"]) for _, fields in reports(command)}


def print_row(work: Work, side: str, figures: Figures, note: str) -> None:
    record("bench_http", side=side, **work._asdict(), **figures._asdict())
    f = figures
    print(
        f"{' x '.join(map(str, work)):>24} {side:6} {f.tokens_per_s:8.0f} {f.ttft_p50_ms:13.1f} {f.ttft_p95_ms:9.1f} "
        f"{f.gap_p50_ms:12.2f} {f.gap_p95_ms:7.2f} {f.gap_p99_ms:7.2f} {f.tokens_per_event:11.2f}   {note}",
        flush=True,
    )


def run_http(args: argparse.Namespace, url: str, alone: dict[Work, Figures]) -> None:
    """Run the works over HTTP, and print each beside what the engine did alone. Raises StreamError."""
    clients = Clients(url, args.clients)
    print(HEADER)
    try:
        for work in args.work:
            warm_up = warm_up_of(work, args)
            clients.run(warm_up.prompts(vocab_size_of(args), seed=0), warm_up.new_tokens)
            streams, busy = clients.run(work.prompts(vocab_size_of(args), seed=1), work.new_tokens)
            figures = Figures.of(streams)
            note = f"all at once for {figures.window_s:.1f} s; busiest client process {100 * busy:.0f}% of a core"
            if work in alone:
                print_row(work, "engine", alone[work], "")
                note = f"{figures.tokens_per_s / alone[work].tokens_per_s:.3f} of the engine alone; {note}"
            print_row(work, "http", figures, note)
    finally:
        clients.close()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--clients", type=int, default=4, metavar="P", help="client processes that share the streams (default 4)")
    add("--url", help="a server that runs already; it should have no prefix cache, or prompts may be in it")
    add("--against-engine", action="store_true", help="run the works on the engine alone too, before the server")
    add("--engine-only", action="store_true", help="only report the engine alone (what --against-engine runs)")
    args = parse(parser)
    if args.url and args.against_engine:
        parser.error("--against-engine compares with a server that this command starts, not with --url")
    return args


def main() -> int:
    args = parse_args()
    if args.engine_only:
        run_engine(args)
        return 0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a stream is a file, for the clients and for the server
    alone = engine_figures(args) if args.against_engine else {}
    if args.url:
        run_http(args, args.url, alone)
        return 0
    with serving(args) as url:
        run_http(args, url, alone)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ChildError, MinserveError, StreamError, ValueError) as error:
        sys.exit(f"bench_http: {error}")
