"""Decode speed of many sparse requests, with random weights at a real model's shapes; vLLM beside it if asked.

    python tools/bench_sparse.py --budget 560                       the full list, what matters most first
    python tools/bench_sparse.py --only 96x16K --idle               one point; --profile FILE: its kernels by stream
    python tools/bench_sparse.py --rival bf16 --rival-path site     vLLM first, in as much memory
    python tools/bench_sparse.py --rival fp8 --no-own               vLLM alone
    python tools/bench_sparse.py --only 96x32K --host-kv-dtype fp8  host blocks in 8 bits: half the link's bytes
    python tools/bench_sparse.py --config tiny --device cpu --context 512 --requests 2 --steps 6     seconds, anywhere

No scheduler and no prefill: contexts are fabricated. Keys, values and digests are random; host blocks are shared by
many blocks of text, digests are not (sparse_bench/rig.py). Steps are launched through the engine's runner (drive.py);
blocks are copied to the host as they become full. No step runs again (the miss policy is `approximate`): random weights
would surprise each other for ever.

Memory (--kv-memory) counts the pages, the digests of every block (and, if it is in 8 bits, its scales) and all tables
of lanes, and the draft head's keys and values; requests are counted up until that ends. A context is what lanes have at
the end of the longest run.

The drift, of what every KV head wants from step to step:

    worst     each takes its cap in every step: behind each step, every block gets another's digests, so that the next
              ranking has nothing to do with what is held. That costs two small kernels, in all settings. It is
              checked by the counters: `caps full` has to be 100%. The hit rate means nothing then
    measured  what random weights do by themselves; --fetch says whether the cap holds in each step or on average
    none      a cap of 0: all is done but for the transfer. `exposed` is a step's time above this one's

--drafts N,M@T: N drafts a step, of which M may be accepted, T tokens a step: each draft is right with the same chance.
With 0,0 there is no head, and the last token's own row looks ahead.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from minserve.errors import ConfigError
from minserve.kernels.fp8 import FP8
from minserve.models.causal_lm import build_model
from minserve.models.config import ModelConfig
from tools.workload import SHAPES, ChildError

from . import plots, rival
from .drive import MEASURED, NONE, WORST, Drafts, Drive, Point
from .points import Place, estimate_s, expected_s, lengths_of, most_drafts, number, points, tokens
from .rig import Base, Rig
from .sizes import Sizes
from .table import Row, line, row_of

GIB = 2**30
BASE_S, HOST_GIB_S = 40.0, 0.35
"""Guesses: for imports, weights and the first compilation of kernels; for a GiB of host memory."""

TRACED_STEPS = 10
LEFT_BYTES = 8 * 10**9
"""Of the GPU's memory, for logits, graphs and CUDA itself, where requests may have the rest."""

DEFAULTS = {"tiny": {"slots": 8, "cap": 2, "host_gib": 0.02, "kv_memory": "64e6"}}
LARGE = {"slots": 128, "cap": 6, "host_gib": 48.0, "kv_memory": "55e9"}


class Bench:
    """Runs points, one rig at a time, and keeps every row: printed, and in OUT/bench_sparse.jsonl."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.rows = args, list[Row]()
        self._folder, self._begin = folder, time.monotonic()
        self._base: Base | None = None
        self._rig: Rig | None = None
        self._without: dict[Point, float] = {}

    @property
    def base(self) -> Base:
        if self._base is None:
            args = self.args
            device = torch.device(args.device)
            host_bytes = int(args.host_gib * GIB)
            has_head = most_drafts(args.drafts) > 0
            host_dtype = FP8 if args.host_kv_dtype == "fp8" else None
            self._base = Base(self._folder, device, has_head=has_head, host_bytes=host_bytes, host_dtype=host_dtype)
        return self._base

    def weights_bytes(self) -> int:
        """Of the model in bfloat16, before there is one."""
        model = build_model(ModelConfig.from_folder(self._folder))
        return 2 * sum(parameter.numel() for parameter in model.parameters())

    @property
    def left_s(self) -> float:
        return float(self.args.budget) - (time.monotonic() - self._begin)

    def sizes(self, context: int) -> Sizes:
        return self.base.sizes(context, self.args.slots)

    def close(self) -> None:
        """Give the host's memory back, which would take the system minutes."""
        self._rig = None
        if self._base is not None:
            self._base.host.close()

    def memory_bytes(self) -> int:
        """For requests."""
        if self.args.kv_memory != "all":
            return int(float(self.args.kv_memory))
        self.base  # noqa: B018  the weights come first
        return int(torch.cuda.mem_get_info()[0]) - LEFT_BYTES

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        if self.args.out is not None:
            with (self.args.out / "bench_sparse.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def run(self, point: Point, num_lanes: int) -> None:
        """num_lanes: of the rig, if it has to be built."""
        rig = self._rig_for(point, num_lanes)
        drive = Drive(rig, point, lengths_of(self.args, point))
        measured = drive.run()
        idle, looked_at = None, self.args.idle or self.args.profile
        if looked_at and self.base.device.type == "cuda":
            idle, table = traced(drive)
            if self.args.profile:
                with self.args.profile.open("a") as file:
                    file.write(f"{point}, {TRACED_STEPS} steps\n\n{table}\n\n")
        same = point._replace(drift=NONE)
        if point.drift == NONE:
            self._without[same] = measured.step_ms
        without = self._without.get(same)
        self.add(row_of(point, measured, rig.sizes, without) | {"idle": idle})
        if point.drift == WORST and measured.full_caps < 1:
            print(f"NOT the worst case: only {measured.full_caps:.2%} of the caps were taken", flush=True)

    def _rig_for(self, point: Point, num_lanes: int) -> Rig:
        rig = self._rig
        if rig is not None and (rig.sizes.context, rig.num_lanes >= point.requests) == (point.context, True):
            return rig
        self._rig = rig = None
        self.base.move_to(None)
        gc.collect()
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()
        self._rig = Rig(self.base, self.sizes(point.context), num_lanes, most_drafts(self.args.drafts))
        return self._rig


def traced(drive: Drive) -> tuple[float, str]:
    """The GPU's idle share, and its kernels by stream, by the profiler, which makes steps a little longer."""
    from torch.profiler import ProfilerActivity, profile

    from tools.gpu_trace import idle_of, kernels, stream_table

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        drive.steps(TRACED_STEPS)
    ran = kernels(trace)
    return idle_of((each.start, each.end) for each in ran).idle, stream_table(ran, TRACED_STEPS)


def run_rival(bench: Bench) -> str | None:
    """What went wrong, if anything did. It runs before there is anything of ours on the GPU."""
    args, weights_bytes = bench.args, bench.weights_bytes()
    try:
        for variant in rival.variants(args.rival, args.drafts):
            memory = bench.memory_bytes()
            for row in rival.run(variant, args.config, args.rival_context, memory, args.rival_python, args.rival_path):
                moved = weights_bytes + row["kv_bytes_step"]
                bench.add(row | {"read_bytes_token": moved / (row["requests"] * row["tokens_step"])})
    except ChildError as error:
        return str(error)
    return None


def print_memory(bench: Bench, context: int, fitting: int) -> None:
    sizes = bench.sizes(context)
    digests = fitting * sizes.num_blocks * sizes.digest_bytes
    one = sizes.memory(2) - sizes.memory(1)
    print(
        f"{context} tokens: {one / 1e6:.0f} MB a request, {sizes.pages_per_lane * sizes.block_bytes / 1e6:.0f} of them "
        f"pages, {sizes.num_blocks * sizes.digest_bytes / 1e6:.0f} digests; {fitting} fit in "
        f"{bench.memory_bytes() / 1e9:.1f} GB, with {digests / GIB:.1f} GiB of digests, a place for each block",
        flush=True,
    )


def run_ours(bench: Bench) -> None:
    args, base = bench.args, bench.base
    about = f"{args.config}, random weights, {str(base.dtype).removeprefix('torch.')}, torch {torch.__version__}"
    name = torch.cuda.get_device_name() if base.device.type == "cuda" else "cpu"
    host, host_dtype = base.host.kv.nbytes, str(base.host_dtype).removeprefix("torch.")
    print(f"{about}, {name}; K {args.slots}, C {args.cap}; host blocks in {host_dtype}")
    print(f"contexts are fabricated; {host / GIB:.2f} GiB of host blocks stand for those of all requests, many to one")
    if base.link_bytes_s:
        print(f"fetches alone: {base.link_bytes_s / 1e9:.1f} GB/s")
    memory = bench.memory_bytes()
    num_fitting = cache(lambda context: bench.sizes(context).num_fitting(memory))
    wanted = list(points(args, num_fitting))
    for context in dict.fromkeys(point.context for point in wanted):
        print_memory(bench, context, num_fitting(context))
    expected = estimate_s(wanted, bench.sizes, args)
    print(f"{len(wanted)} runs, about {expected:.0f} s of {bench.left_s:.0f} that are left", flush=True)
    print(line(None), flush=True)
    for position, point in enumerate(wanted):
        sizes = bench.sizes(point.context)
        if (needed := expected_s(point, sizes, lengths_of(args, point))) > bench.left_s:
            print(f"no time: {point.requests} x {point.context}, {point.drift} ({needed:.0f} s)", flush=True)
            continue
        same = (each.requests for each in wanted[position:] if each.context == point.context)
        try:
            bench.run(point, max(same))
        except torch.cuda.OutOfMemoryError as error:
            print(f"no memory: {point.requests} x {point.context}: {error}".splitlines()[0], flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", choices=SHAPES, default="qwen3-8b", help="the model's shapes")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--context", nargs="+", type=tokens, default=[2**14, 2**15, 2**16, 2**17], metavar="TOKENS", help="such as 16K")
    add("--requests", nargs="+", type=number, default=[8, 16, 32, 48, 64, 96, 128, 0], metavar="N", help="or fit")
    add("--only", nargs="+", type=Place.parse, metavar="NxCONTEXT", help="these and no others; fitx32K: as many as fit")
    add("--drift", nargs="+", choices=(WORST, MEASURED, NONE), default=[NONE, WORST, MEASURED])
    add("--drafts", nargs="+", type=Drafts.parse, default=[Drafts(1, 0, 1.0)], metavar="N,M[@T]", help="default 1,0")
    add("--fetch", choices=("fixed", "adaptive"), default="adaptive", help="of the drift `measured`")
    add("--slots", type=int, metavar="K")
    add("--cap", type=int, metavar="C")
    add(
        "--warm-up", type=int, default=10, metavar="N", help="steps that do not count; four times as many of `measured`"
    )
    add("--windows", type=int, default=3, metavar="N", help="whose medians are given")
    add("--steps", type=int, default=30, metavar="N", help="of a window")
    add("--kv-memory", metavar="BYTES", help="such as 55e9, an 80 GB card's; all: what the GPU has")
    add("--host-gib", type=float, metavar="GIB", help="of host blocks")
    add("--host-kv-dtype", choices=("auto", "fp8"), default="auto", help="of host blocks; auto: as in pages")
    add("--budget", type=float, default=3600, metavar="SECONDS", help="no run begins that would end later")
    add("--idle", action="store_true", help="also the GPU's idle share, by the profiler")
    add("--profile", type=Path, metavar="FILE", help="append each run's kernels, by stream, to it")
    add("--rival", nargs="+", choices=("bf16", "fp8", "drafts"), default=[], help="run vLLM too, before ours")
    add("--no-own", action="store_true", help="nothing but the rival")
    add("--rival-context", nargs="+", type=tokens, default=[2**14, 2**15], metavar="TOKENS")
    add("--rival-python", default=sys.executable, metavar="FILE", help="the interpreter that has vLLM")
    add("--rival-path", metavar="DIR", help="where vLLM was unpacked; becomes the rival's PYTHONPATH")
    add("--out", type=Path, default=os.environ.get("OUT"), metavar="DIR", help="for rows and pictures; default $OUT")
    args = parser.parse_args()
    for name, value in DEFAULTS.get(args.config, LARGE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.no_own and not args.rival:
        parser.error("--no-own needs --rival")
    if args.rival and args.kv_memory == "all":
        parser.error("--rival needs --kv-memory in bytes, which both sides get")
    return args


def main() -> int:
    args = parse_args()
    torch.manual_seed(0)
    longest = max([*args.context, *(place.context for place in args.only or ())])
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[args.config].config | {"max_position_embeddings": 2 * longest}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
        bench = Bench(args, Path(folder))
        starts = f"about {BASE_S + HOST_GIB_S * args.host_gib:.0f} s until the first run"
        print(line(None) if args.no_own else starts + ", after the rival's" * bool(args.rival), flush=True)
        failure = run_rival(bench) if args.rival else None
        try:
            if not args.no_own:
                run_ours(bench)
        except ConfigError as error:
            sys.exit(f"bench_sparse: {error}")
        finally:
            bench.close()
        if args.out is not None:
            paths = plots.draw(bench.rows, args.out)
            print("pictures: " + (", ".join(map(str, paths)) or "none, there is no matplotlib"))
    if failure:
        print(f"bench_sparse: the rival: {failure}", file=sys.stderr)
    return int(failure is not None)
