"""How fast the kernels are on this GPU, beside its roofline and torch, at the shapes of Qwen3-8B in bfloat16.

    python tools/bench_kernels.py linear attention elementwise sampling prefill working_set

Every figure is the median of several replays of a CUDA graph that holds many calls. Weights, keys and values are a GiB
and more and are read in turns, so that the L2 never serves them; activations are in the L2 in a real step as well, and
may stay there. `linear` also prints the lines of kernels/linear.py's tables. With OUT set, all figures are in
$OUT/bench_kernels.json, one JSON object a line. A variant that fails, or has no time left, is inf.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_working_set import bench_ranking, bench_working_set
from kernel_clock import BF16_TFLOP_S, DEVICE, READ_TB_S, Call, Clock, random, rate

HIDDEN, MLP, VOCAB = 4096, 12288, 151936
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
LAYERS, EPS = 36, 1e-6
MAX_BLOCKS = 40960 // BLOCK
LINEAR_SHAPES = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "o": (HEADS * HEAD_DIM, HIDDEN),
    "gate_up": (HIDDEN, 2 * MLP),
    "down": (MLP, HIDDEN),
    "head": (HIDDEN, VOCAB),
}
LINEAR_ROWS = (1, 2, 4, 8, 16, 32, 64)
DECODE_WORKS = ((1, 1), (1, 16), (1, 32), (8, 16), (22, 16), (64, 1), (256, 1))  # requests, 1024 tokens of context
PREFILL_WORKS = (  # queries, keys, causal
    (512, 512, True),
    (2048, 2048, True),
    (8192, 8192, True),
    (512, 16384, False),
    (2048, 30720, False),
    (8192, 8192, False),
    (8192, 24576, False),
)
SAMPLING_KINDS = (("greedy", 0.0, 0, 1.0), ("temperature", 0.8, 0, 1.0), ("top-k, top-p", 0.8, 50, 0.9))
# block_n, block_k, num_warps, num_stages
VECTOR_TILES = (
    (8, 512, 4, 4),
    (8, 512, 4, 1),
    (8, 1024, 8, 3),
    (4, 1024, 4, 4),
    (4, 1024, 4, 1),
    (4, 2048, 8, 1),
    (16, 256, 4, 5),
    (16, 512, 8, 3),
    (32, 256, 8, 4),
)
NARROW_TILES = (
    (16, 256, 1, 4),
    (16, 256, 2, 6),
    (16, 512, 4, 4),
    (32, 128, 2, 6),
    (32, 256, 2, 4),
    (32, 256, 4, 4),
    (32, 512, 4, 3),
    (64, 256, 4, 4),
)
WIDE_TILES = ((64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 3), (128, 128, 8, 4))
DECODE_TILES = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3))


def fastest(times: dict[Any, float]) -> tuple[Any, float]:
    return min(times.items(), key=lambda item: item[1])


def linear_tiles(rows: int, size_in: int) -> list[Any]:
    from minserve.kernels.linear import Tile

    tiles = [Tile(*blocks, tensor_cores=False) for blocks in VECTOR_TILES if rows == 1]
    tiles += [Tile(*blocks) for blocks in NARROW_TILES if rows <= 16]
    tiles += [Tile(*blocks) for blocks in WIDE_TILES]
    tiles += [Tile(64, 128, 4, 6, splits=splits) for splits in (2, 4)]
    return [tile for tile in tiles if size_in % (tile.block_k * tile.splits) == 0]


def bench_product(clock: Clock, name: str, rows: int, weights: list[torch.Tensor]) -> tuple[float, float, float]:
    """Microseconds of cuBLAS, of the best, and of the best if kernels may start early: it takes one that is like it
    before it, so a step gains less where kernels that were not made for it lie between."""
    from minserve.kernels.linear import Choice, linear_silu_mul_triton, linear_triton
    from minserve.kernels.silu_mul import silu_mul

    size_out, size_in = weights[0].shape
    x = random(rows, size_in)
    num_bytes = 2.0 * (size_in * size_out + rows * (size_in + size_out))

    def run(op: Callable[..., object], variant: object, *args: object) -> float:
        calls: list[Call] = [functools.partial(op, x, weight, *args) for weight in weights]
        work = f"{name} {size_in} -> {size_out} x {rows}"
        return clock.time_us(calls, work=work, variant=str(variant), num_bytes=num_bytes)

    torch_us = run(F.linear, "cuBLAS")
    times = {tile: run(linear_triton, tile, None, tile) for tile in linear_tiles(rows, size_in)}
    tile, us = fastest(times)
    early = [tile._replace(ahead=ahead) for ahead in (1, 3) if ahead * tile.block_k * tile.splits <= size_in]
    early_tile, early_us = fastest({tile: run(linear_triton, tile, None, tile) for tile in early})
    print(f"{name:8} x {rows:2}  " + "   ".join(rate(us, num_bytes) for us in (torch_us, us, early_us)))
    print(f"{'':13}{Choice(rows, size_out, tile)}, early: {early_tile.ahead}", flush=True)
    if name == "gate_up":
        few = [tile for tile in sorted(times, key=lambda tile: times[tile])[:4] if tile.splits == 1]
        fused = {tile: run(linear_silu_mul_triton, f"silu_mul {tile}", None, tile) for tile in few}
        apart_us = run(lambda x, weight: silu_mul(F.linear(x, weight)), "cuBLAS, silu_mul")
        tile, fused_us = fastest(fused) if fused else (None, float("inf"))
        print(f"{'+ silu_mul':13}{rate(apart_us, num_bytes)}   {rate(fused_us, num_bytes)}\n{'':13}{tile}", flush=True)
    return torch_us, min(torch_us, us), min(torch_us, us, early_us)


def bench_linear(clock: Clock) -> None:
    pool = random(HIDDEN * VOCAB, scale=0.02)
    steps_us = {rows: [0.0, 0.0, 0.0] for rows in LINEAR_ROWS}
    read_bytes = 0.0
    print(f"{'':15}{'cuBLAS':27}{'best':27}best, started early")
    for name, (size_in, size_out) in LINEAR_SHAPES.items():
        copies, layers = pool.numel() // (size_in * size_out), 1 if name == "head" else LAYERS
        weights = list(pool[: copies * size_in * size_out].view(copies, size_out, size_in))
        read_bytes += 2.0 * size_in * size_out * layers
        for rows in LINEAR_ROWS:
            for column, us in enumerate(bench_product(clock, name, rows, weights)):
                steps_us[rows][column] += us * layers
    print(f"all products of a step, ms; reading their weights takes {read_bytes / READ_TB_S / 1e9:.3f}")
    for rows, columns in steps_us.items():
        print(f"{'':8} x {rows:2}  " + "".join(f"{us / 1e3:<27.3f}" for us in columns))


def bench_decode(clock: Clock, entries: int, context: int) -> None:
    from minserve.kernels.decode_attention import decode_attention_triton, decode_batch

    num_pages = entries * context // BLOCK
    num_layers = max(2, 2**30 // (num_pages * KV_HEADS * 2 * BLOCK * HEAD_DIM * 2))
    kv = random(num_layers, num_pages, KV_HEADS, 2, BLOCK, HEAD_DIM)
    table = torch.zeros(entries, MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
    table[:, : context // BLOCK] = torch.randperm(num_pages, device=DEVICE).view(entries, -1)
    lengths = torch.full((entries,), context, device=DEVICE)
    batch = decode_batch(table, torch.arange(entries, device=DEVICE), lengths, kv[0])
    q = random(entries, HEADS, HEAD_DIM)
    num_bytes = 2.0 * (kv[0].numel() + 2 * q.numel())
    work = f"{entries} x {context // 1024}K"

    def run(options: dict[str, int]) -> float:
        calls: list[Call] = [functools.partial(decode_attention_triton, q, layer, batch, **options) for layer in kv]
        return clock.time_us(calls, work=work, variant=json.dumps(options), num_bytes=num_bytes)

    default_us = run({})
    options = [dict(zip(("tile", "num_warps", "num_stages"), values)) for values in DECODE_TILES]
    times = {json.dumps(each): run(each) for each in options}
    best = json.loads(fastest(times)[0])
    for splits in (1, 2, 4, 8, 16, 32, 64):
        if 64 <= entries * KV_HEADS * splits <= 4096 and context // splits >= 128:
            times[json.dumps(best | {"splits": splits})] = run(best | {"splits": splits})
    name, us = fastest(times)
    # The same bytes as if they lay side by side: what torch does without pages.
    dense = kv.view(num_layers, 2, entries, KV_HEADS, context, HEAD_DIM)
    attend = functools.partial(F.scaled_dot_product_attention, q[:, :, None], enable_gqa=True)
    torch_calls: list[Call] = [functools.partial(attend, k, v) for k, v in dense]
    torch_us = clock.time_us(torch_calls, work=work, variant="torch, no pages", num_bytes=num_bytes)
    print(
        f"{work:9} {rate(torch_us, num_bytes)}   {rate(default_us, num_bytes)}   {rate(us, num_bytes)}  {name}",
        flush=True,
    )


def bench_attention(clock: Clock) -> None:
    print(f"{'':10}{'torch, no pages':27}{'default':27}best")
    for entries, context_k in DECODE_WORKS:
        bench_decode(clock, entries, context_k * 1024)


def bench_prefill(clock: Clock) -> None:
    print("queries    keys  causal   first call s        ms   TFLOP/s")
    for queries, keys, causal in PREFILL_WORKS:
        q, k, v = (random(1, h, n, HEAD_DIM) for h, n in ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)))
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        attend = functools.partial(op, q, k, v, None, True, 0.0, causal, False)
        begin = time.monotonic()
        attend()
        torch.cuda.synchronize()
        plan_s = time.monotonic() - begin
        flops = 4.0 * HEADS * HEAD_DIM * queries * (keys / 2 if causal else keys)
        work, variant = f"{queries} of {keys}{' causal' if causal else ''}", f"cuDNN, first call {plan_s:.3f} s"
        us = clock.time_us([attend], work=work, variant=variant, flops=flops)
        print(f"{queries:7} {keys:7}  {causal!s:6} {plan_s:14.3f} {us / 1e3:9.3f} {flops / us / 1e6:9.0f}", flush=True)


def elementwise_calls(rows: int, copies: int) -> Iterator[tuple[str, list[Call], list[Call], float]]:
    """(operation, calls of Triton, of torch, bytes that one reads and writes)."""
    from minserve.kernels import norm_rope_store, rms_norm, silu_mul
    from minserve.kernels.rope import gather_rope

    def by_both(module: object, name: str, *args: list[Any]) -> tuple[list[Call], list[Call]]:
        triton, by_torch = (getattr(module, name + ending) for ending in ("_triton", "_reference"))
        both = ([functools.partial(op, *each) for each in zip(*args)] for op in (triton, by_torch))
        return next(both), next(both)

    weight, size = random(HIDDEN), HEADS + 2 * KV_HEADS
    x, residual = ([random(rows, HIDDEN) for _ in range(copies)] for _ in range(2))
    calls = by_both(rms_norm, "add_rms_norm", x, residual, [weight] * copies, [EPS] * copies)
    yield "add_rms_norm", *calls, 8.0 * rows * HIDDEN

    calls = by_both(silu_mul, "silu_mul", [random(rows, 2 * MLP) for _ in range(copies)])
    yield "silu_mul", *calls, 6.0 * rows * MLP

    kv = random(-(-rows // BLOCK), KV_HEADS, 2, BLOCK, HEAD_DIM)
    places = torch.randperm(kv.shape[0] * BLOCK, device=DEVICE)[:rows]
    rope = gather_rope(torch.rand(rows, 2, HEAD_DIM // 2, device=DEVICE), torch.arange(rows, device=DEVICE))
    rest = ((random(HEAD_DIM), random(HEAD_DIM)), EPS, rope, kv, places)
    qkv = [random(rows, size, HEAD_DIM) for _ in range(copies)]
    calls = by_both(norm_rope_store, "norm_rope_store", qkv, *([arg] * copies for arg in rest))
    yield "norm_rope_store", *calls, rows * HEAD_DIM * (4.0 * size + 8.0)


def bench_elementwise(clock: Clock) -> None:
    print(f"{'':25}{'torch':27}triton")
    for rows in (1, 64, 256, 8192):
        for name, triton, by_torch, num_bytes in elementwise_calls(rows, copies=64 if rows <= 256 else 4):
            work = f"{name} x {rows}"
            torch_us = clock.time_us(by_torch, work=work, variant="torch", num_bytes=num_bytes)
            us = clock.time_us(triton, work=work, variant="triton", num_bytes=num_bytes)
            print(f"{work:25}{rate(torch_us, num_bytes)}   {rate(us, num_bytes)}", flush=True)


def bench_sampling(clock: Clock) -> None:
    from minserve.kernels.sampling import SamplingState, draw

    for rows in (1, 64, 256):
        logits = [random(rows, VOCAB, scale=2.0) for _ in range(max(4, min(16, 1024 // rows)))]
        lanes = torch.arange(rows, device=DEVICE)
        ops: dict[str, Callable[[torch.Tensor], object]] = {
            "torch argmax": functools.partial(torch.argmax, dim=-1),
            "torch sort": functools.partial(torch.sort, dim=-1, descending=True),
        }
        for name, temperature, top_k, top_p in SAMPLING_KINDS:
            state = SamplingState(
                temperature=torch.full((rows,), temperature, device=DEVICE),
                top_p=torch.full((rows,), top_p, device=DEVICE),
                min_p=torch.zeros(rows, device=DEVICE),
                top_k=torch.full((rows,), top_k, device=DEVICE),
                seed=torch.arange(2 * rows, device=DEVICE).view(rows, 2),
                num_tokens=torch.zeros_like(lanes),
            )
            ops[name] = functools.partial(draw, lanes=lanes, state=state)
        for name, op in ops.items():
            calls: list[Call] = [functools.partial(op, each) for each in logits]
            num_bytes = 2.0 * rows * VOCAB
            us = clock.time_us(calls, work=f"{name} x {rows}", variant=name, num_bytes=num_bytes)
            print(f"{name:12} x {rows:4} {rate(us, num_bytes)}", flush=True)


SECTIONS: dict[str, Callable[[Clock], None]] = {
    "linear": bench_linear,
    "attention": bench_attention,
    "elementwise": bench_elementwise,
    "sampling": bench_sampling,
    "prefill": bench_prefill,
    "working_set": bench_working_set,
    "ranking": bench_ranking,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS) + "; all if none is named")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each section (default: 60)")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print("bench_kernels: needs a CUDA device")
        return 2
    folder = os.environ.get("OUT")
    results = (Path(folder) / "bench_kernels.json").open("a") if folder else None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"roofline: {READ_TB_S} TB/s, {BF16_TFLOP_S:.0f} TFLOP/s (measured on an H200)")
    for section in args.sections or SECTIONS:
        print(f"\n== {section}", flush=True)
        begin = time.monotonic()
        try:
            SECTIONS[section](Clock(section, begin + args.seconds, results, torch.cuda.Stream()))
        except (ImportError, AttributeError) as error:
            print(f"skipped: {error}")
        except Exception as error:  # the other sections may yet do
            print(f"FAILED: {type(error).__name__}: {str(error)[:500]}")
        print(f"({time.monotonic() - begin:.1f} s)", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
