"""Times of GPU kernels, for tools/bench_kernels.py: CUDA graphs of many calls, replayed between CUDA events."""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import TextIO

import torch

READ_TB_S, BF16_TFLOP_S = 4.4, 790.0
"""The roofline: measured on an H200 by a sum of 8 GiB and a product of 8192 x 8192 x 8192."""

DEVICE, DTYPE = "cuda", torch.bfloat16
REPLAYS = 5

Call = Callable[[], object]


@dataclasses.dataclass
class Clock:
    """Times calls within the seconds that a section has, and keeps every figure."""

    section: str
    deadline: float
    results: TextIO | None
    stream: torch.cuda.Stream

    def time_us(self, calls: list[Call], *, work: str, variant: str, num_bytes: float = 0, flops: float = 0) -> float:
        """Microseconds a call, or infinity if it failed or the section's time is up.

        calls: the same call on different data; num_bytes, flops: what one of them has to read and write, and to do.
        """
        if time.monotonic() > self.deadline:
            return float("inf")
        ideal_us = max(num_bytes / READ_TB_S / 1e6, flops / BF16_TFLOP_S / 1e6, 2.0)
        rounds = max(1, min(256 // len(calls), round(1500 / (ideal_us * len(calls)))))
        try:
            us = graph_us(calls * rounds, self.stream)
        except Exception as error:  # a variant that does not compile or fit is a result, too
            print(f"    {work}, {variant}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            return float("inf")
        if self.results is not None:
            rates = {"tb_s": round(num_bytes / us / 1e6, 3), "tflop_s": round(flops / us / 1e6, 1)}
            figures = {"us": round(us, 3)} | {name: value for name, value in rates.items() if value}
            print(
                json.dumps({"section": self.section, "work": work, "variant": variant} | figures),
                file=self.results,
                flush=True,
            )
        return us


def graph_us(calls: list[Call], stream: torch.cuda.Stream) -> float:
    """Microseconds a call when all of them are one graph: the median of its replays."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        # Not torch.cuda.graph(): it empties caches, which for hundreds of graphs takes longer than all the timing.
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events)) * 1e3 / len(calls)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(0, scale)


def rate(us: float, num_bytes: float) -> str:
    return f"{us:9.2f} us {num_bytes / us / 1e6:5.2f} TB/s"
