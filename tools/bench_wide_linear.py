"""Products of some hundred rows, a part of tools/bench_kernels.py: alone, and while blocks are fetched beside them.

Fetches are as in a step: one behind the other on a stream of high priority, each of as many blocks as the worst case
has a layer. If the last ends before a product has been timed, that counts as a failure.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from kernel_clock import DEVICE, DTYPE, Call, Clock, Start, random

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}
ROWS = {128: (128, 64), 192: (192, 96), 256: (256, 128), 272: (272, 144)}
"""And how many of them a program takes, if it takes all, or half."""
HOST_PIECES, PAGES, FETCHES, FETCHED, PIECE = 2**18, 2**15, 64, 96 * 8 * 6, (2, 16, 128)


def fetches() -> Start:
    """Starts fetches of some 48 ms."""
    from minserve.kernels.fetch_blocks import copy_pieces

    stream, kv = torch.cuda.Stream(priority=-1), random(PAGES, *PIECE)
    host = torch.zeros(HOST_PIECES, *PIECE, dtype=DTYPE, pin_memory=True)
    places = [torch.randint(end, (FETCHES, FETCHED), device=DEVICE) for end in (HOST_PIECES, PAGES)]
    copies, count = torch.stack(places, dim=2), torch.full((1,), FETCHED, dtype=torch.int32, device=DEVICE)

    def start() -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for each in copies:
                copy_pieces(each, count, host, None, kv)
            return stream.record_event()

    torch.cuda.synchronize()  # what it reads is written on another stream
    return start


def wide_tiles(rows: int) -> list[Any]:
    from minserve.kernels.linear_tiles import Tile

    tile, two = Tile(128, 64, 8, 4), functools.partial(Tile, programs=264)  # an SM has room for two of 4 warps
    for_all = (tile, tile._replace(ahead=1), tile._replace(programs=120), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2))
    sizes = zip(ROWS[rows], ((*for_all, two(64, 64, 4, 2)), (Tile(256, 64, 8, 3), two(128, 64, 4, 3))))
    return [tile._replace(block_m=block_m) for block_m, tiles in sizes for tile in tiles]


def bench_product(clocks: list[Clock], name: str, rows: int, pool: torch.Tensor) -> list[float]:
    """Microseconds by each clock, of torch and of the tiles that are best by it."""
    from minserve.kernels.linear import linear_silu_mul_triton, linear_triton
    from minserve.kernels.linear_tiles import Choice
    from minserve.kernels.silu_mul import silu_mul

    (size_in, size_out), gated, tiles = SHAPES[name], name == "gate_up", wide_tiles(rows)
    x, flops, work = random(rows, size_in), 2.0 * rows * size_in * size_out, f"{name} x {rows}"
    by_tile = linear_silu_mul_triton if gated else linear_triton
    ops: dict[Any, Callable[..., object]] = {tile: functools.partial(by_tile, bias=None, tile=tile) for tile in tiles}
    ops = {"torch": (lambda x, weight: silu_mul(F.linear(x, weight))) if gated else F.linear} | ops
    times: dict[Any, list[float]] = {}
    for variant, op in ops.items():
        calls: list[Call] = [functools.partial(op, x, weight) for weight in pool.view(-1, size_out, size_in)]
        us = times[variant] = [clock.time_us(calls, work=work, variant=str(variant), flops=flops) for clock in clocks]
        rates = "   ".join(f"{each:8.2f} us {flops / each / 1e6:4.0f} TFLOP/s" for each in us)
        print(f"{work:13}{rates}   {us[1] / us[0]:5.2f}   {variant}", flush=True)
    best = [min(tiles, key=lambda tile: times[tile][column]) for column in (0, 1)]
    print("\n".join(f"    {Choice(rows, size_out // (1 + gated), tile, size_in, min_rows=65)}" for tile in best))
    return [*times["torch"], *(times[tile][column] for column, tile in enumerate(best))]


def bench_wide_linear(clock: Clock) -> None:
    from minserve.kernels.linear import linear_triton

    pool, start = random(6 * 4096 * 24576, scale=0.02), fetches()
    start()
    with ThreadPoolExecutor() as threads:  # which compile
        multiply = functools.partial(linear_triton, random(272, 4096), pool[: 2**20].view(-1, 4096), None)
        threads.map(multiply, [tile for rows in ROWS for tile in wide_tiles(rows)])
    beside = dataclasses.replace(clock, section=f"{clock.section}, fetches", start_beside=start)
    print(f"{'':17}alone{'':20}beside fetches{'':13}ratio")
    for rows in ROWS:
        columns = zip(*(bench_product([clock, beside], name, rows, pool) for name in SHAPES))
        print(f"a layer x {rows}: torch alone, beside, ours: {', '.join(f'{sum(us):.0f}' for us in columns)} us\n")
