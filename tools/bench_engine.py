"""Decode and prefill speed of the engine alone, with random weights at a real model's shapes; vLLM beside it if asked.

    python tools/bench_engine.py --rival --rival-path site          the full list, both sides
    python tools/bench_engine.py --work 1x1024 64x1024 --repeats 3 --idle
    python tools/bench_engine.py --config tiny --device cpu         seconds, on any machine

The method is in workload.py. Prefix caching is off (or its cache is empty: host blocks need one), text is greedy, and
neither side has a tokenizer. A start is the time from a process's creation to the first token of its first request;
compilers' caches are as they are found, so a second run may differ from a first. vLLM runs first, and our engine is
built when its process has ended. With OUT set, every figure is also a line in $OUT/bench_engine.json.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from streams import quantile
from workload import (
    ChildError,
    Timing,
    Work,
    add_flags,
    as_flags,
    engine_options,
    first_request,
    measure,
    parse,
    record,
    report,
    reports,
    side_flags,
    vocab_size_of,
    write_config,
)

from minserve.config import EngineConfig
from minserve.engine.build import build_engine
from minserve.engine.core import Engine
from minserve.errors import ConfigError
from minserve.flag_values import sparse
from minserve.protocol import SamplingParams, Submit

TRACED_STEPS = 50
SHORTEST_RANDOM = 64
HEADER = "requests x context x new   step ms   decode tok/s   prefill tok/s"
RIVAL_HEADER = "  |  vLLM: step ms   decode tok/s   prefill tok/s  |  decode   prefill"


def build(args: argparse.Namespace) -> Engine:
    """Our engine, as the flags want it. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.config)
        return build_engine(
            EngineConfig.checked(
                model_path=folder,
                load_format="dummy",
                device=args.device,
                enable_prefix_caching=args.host_kv is not None,
                **engine_options(args),
                **sparse_options(args),
            )
        )


def sparse_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of requests that keep a working set."""
    if args.host_kv is None:
        return {}
    mode, above = args.sparse
    options = {"host_kv": int(args.host_kv * 2**30), "sparse": mode, "sparse_above": above}
    return options | {"working_set_blocks": args.working_set_blocks, "miss_policy": args.miss_policy}


def submit(engine: Engine, prompts: list[list[int]], new_tokens: int) -> None:
    """Queue a request of each prompt, named by its number."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(request_id=str(number), prompt_token_ids=prompt, params=params))


def serve(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds until the last token of all. No prompt is found in any cache."""
    engine.clear_prefix_cache()
    begin = time.perf_counter()
    submit(engine, prompts, new_tokens)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin


class RivalRun(NamedTuple):
    """What vLLM did. failure: why it ended early, if it did; the timings are those until then."""

    version: str
    start_s: float
    timings: dict[Work, Timing]
    failure: str | None


def run_rival(args: argparse.Namespace) -> RivalRun:
    """Run vLLM in a process of its own, from its start to its end."""
    script = Path(__file__).resolve().with_name("rival_vllm.py")
    # From here, or with our own PYTHONPATH, its libraries would find our folders `kernels` and `models`.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if args.rival_path:
        env["PYTHONPATH"] = os.path.abspath(args.rival_path)
    version, start_s, timings = "", float("nan"), dict[Work, Timing]()
    try:
        for seconds, fields in reports([args.rival_python, str(script), *side_flags(args)], env, tempfile.gettempdir()):
            if "version" in fields:
                version, start_s = fields["version"], seconds
                record("bench_engine", side="vllm", config=args.config, version=version, start_s=start_s)
            else:
                timing = Timing(Work(*fields["work"]), fields["first_s"], fields["whole_s"])
                timings[timing.work] = timing
                _record_timing("vllm", args.config, timing)
                print(f"vLLM: {_columns(timing)}", file=sys.stderr, flush=True)
    except ChildError as error:
        return RivalRun(version, start_s, timings, str(error))
    return RivalRun(version, start_s, timings, None)


def start_seconds(args: argparse.Namespace) -> float:
    """How long our engine takes from the creation of a fresh process to its first token."""
    command = [sys.executable, __file__, "--start-only", *as_flags({"device": args.device}), *side_flags(args)]
    [(seconds, _)] = reports(command)
    record("bench_engine", side="minserve", config=args.config, start_s=seconds)
    return seconds


def _record_timing(side: str, config: str, timing: Timing) -> None:
    figures = {name: getattr(timing, name) for name in ("step_ms", "decode_rate", "prefill_rate")}
    record("bench_engine", side=side, config=config, **timing.work._asdict(), **figures)


def _columns(timing: Timing) -> str:
    work = " x ".join(map(str, timing.work))
    return f"{work:>24} {timing.step_ms:9.2f} {timing.decode_rate:14.0f} {timing.prefill_rate:15.0f}"


def _rival_columns(ours: Timing, theirs: Timing | None) -> str:
    """The rival's figures, and ours over theirs."""
    if theirs is None:
        return ""
    figures = f"{theirs.step_ms:14.2f} {theirs.decode_rate:14.0f} {theirs.prefill_rate:15.0f}"
    ratios = f"{ours.decode_rate / theirs.decode_rate:5.2f}x {ours.prefill_rate / theirs.prefill_rate:8.2f}x"
    return f"  | {figures}  | {ratios}"


def print_table(engine: Engine, args: argparse.Namespace, rival: RivalRun | None) -> None:
    """Run the works on our engine, and print each beside the rival's figures."""
    print(HEADER + (RIVAL_HEADER if rival else ""))
    for work in args.work:
        timing = measure(partial(serve, engine), work, args)
        _record_timing("minserve", args.config, timing)
        crowded = work.requests * -(-(work.context + work.new_tokens) // 16) > engine.info.num_pages
        note = "  (more than the pages hold: some wait or are preempted)" if crowded else ""
        print(_columns(timing) + _rival_columns(timing, rival and rival.timings.get(work)) + note, flush=True)
        if args.host_kv is not None:
            stats = engine.step().stats
            wanted = max(1, stats.sparse_hits + stats.sparse_misses)
            print(
                f"  so far {stats.sparse_steps} steps of sparse requests, {stats.sparse_retries} again; "
                f"{100 * stats.sparse_hits / wanted:.1f}% of what they wanted was there, "
                f"{stats.bytes_fetched / 1e9:.1f} GB fetched, {stats.bytes_stored / 1e9:.1f} GB stored"
            )


def print_random_lengths(engine: Engine, args: argparse.Namespace) -> None:
    """Whether a prompt of a length that was never seen costs more than one that was: kernels, plans, graphs."""
    vocab_size = vocab_size_of(args)
    lengths = random.Random(0).sample(range(SHORTEST_RANDOM, engine.info.max_model_len), args.random_lengths)
    first, again = ([serve(engine, Work(1, n).prompts(vocab_size, s), 1) for n in lengths] for s in (1, 2))
    ratios = [new / known for new, known in zip(first, again, strict=True)]
    p50, p95 = quantile(ratios, 0.5), quantile(ratios, 0.95)
    record("bench_engine", side="minserve", random_lengths=len(lengths), p50=p50, p95=p95, worst=max(ratios))
    print(
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, time to first token the first time that a "
        f"length is seen / the second: p50 {p50:.2f}, p95 {p95:.2f}, worst {max(ratios):.2f}"
    )


def print_traces(engine: Engine, args: argparse.Namespace) -> None:
    """What the profiler says of decode steps."""
    from gpu_trace import idle_of, intervals, kernel_table, trace_decode

    vocab_size = vocab_size_of(args)
    if args.idle:
        work = Work(1, min(1024, engine.info.max_model_len // 2))
        idle = idle_of(intervals(trace_decode(engine, work.prompts(vocab_size, seed=0), TRACED_STEPS)))
        record("bench_engine", side="minserve", requests=1, context=work.context, **idle._asdict())
        print(
            f"1 x {work.context}, {TRACED_STEPS} steps under the profiler, {idle.span_us / 1000 / TRACED_STEPS:.2f} ms "
            f"each: the GPU is idle {100 * idle.idle:.1f}% of the time, {100 * idle.between_steps:.1f}% between steps"
        )
    if args.profile:
        work = args.work[0]
        trace = trace_decode(engine, work.prompts(vocab_size, seed=0), TRACED_STEPS)
        args.profile.write_text(f"{TRACED_STEPS} decode steps of {work}\n{kernel_table(trace)}\n")
        print(f"kernels of {work}: {args.profile}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--rival", action="store_true", help="run vLLM too, before ours")
    add("--rival-python", default=sys.executable, metavar="FILE", help="the interpreter that has vLLM")
    add("--rival-path", metavar="DIR", help="where vLLM was unpacked; becomes the rival's PYTHONPATH")
    add("--start", action=argparse.BooleanOptionalAction, default=True, help="measure our start in a fresh process")
    add("--start-only", action="store_true", help="only serve one token (what --start runs)")
    add("--host-kv", type=float, metavar="GIB", help="of host memory for KV; needed by what follows")
    add("--sparse", type=sparse, default=("pressure", 0), metavar="MODE", help="never, pressure (default) or above:4k")
    add("--working-set-blocks", type=int, default=128, metavar="N", help="that a sparse request keeps (default 128)")
    add(
        "--miss-policy",
        choices=("approximate", "retry", "recall"),
        default="approximate",
        help="of sparse ones; random weights surprise each other for ever (default approximate)",
    )
    add("--random-lengths", type=int, metavar="N", help="also N prompts of random lengths, one at a time")
    add("--idle", action="store_true", help="also the GPU's idle share in decode steps of 1x1024")
    add("--profile", type=Path, metavar="FILE", help="also a table of the kernels in decode steps of the first work")
    args = parse(parser)
    if (args.idle or args.profile) and (args.device == "cpu" or not torch.cuda.is_available()):
        parser.exit(2, "bench_engine: --idle and --profile look at a GPU's kernels, and this engine runs on the CPU\n")
    return args


def main() -> int:
    args = parse_args()
    if args.start_only:
        serve(build(args), first_request(args), 1)
        report(first_token=True)
        return 0
    rival = run_rival(args) if args.rival else None
    start_s = start_seconds(args) if args.start else None
    engine = build(args)
    print(f"{args.config}, random weights, {engine.info.dtype}, {engine.info.device}, torch {torch.__version__}")
    if rival and rival.version:
        print(f"vLLM {rival.version}: start to first token {rival.start_s:.1f} s")
    if start_s is not None:
        print(f"minserve: start to first token {start_s:.1f} s")
    print_table(engine, args, rival)
    if args.random_lengths:
        print_random_lengths(engine, args)
    print_traces(engine, args)
    if rival and rival.failure:
        print(f"bench_engine: the rival: {rival.failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, ChildError) as error:
        sys.exit(f"bench_engine: {error}")
