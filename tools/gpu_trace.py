"""What the GPU did during some steps of an engine: how long it was idle, and which kernels took its time.

Both come from torch.profiler with CUDA activities only, which sees every kernel of a replayed graph and costs the CPU
little; some time a kernel it does cost, so that steps are a little longer than without.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minserve.engine.core import Engine
from minserve.protocol import SamplingParams, Submit

BETWEEN_STEPS_US = 10.0
"""Gaps between the kernels of one graph are shorter than this."""

Interval = tuple[float, float]


class Idle(NamedTuple):
    """Shares of the time from the first kernel's begin to the last one's end.

    idle: nothing runs. between_steps: that, in gaps longer than BETWEEN_STEPS_US only.
    """

    idle: float
    between_steps: float
    span_us: float


def idle_of(intervals: Iterable[Interval]) -> Idle:
    """How idle a device was that was busy in these intervals, in microseconds, which may overlap."""
    ordered = sorted(intervals)
    gaps: list[float] = []
    begin, busy_until = ordered[0]
    for start, end in ordered:
        gaps.append(max(0.0, start - busy_until))
        busy_until = max(busy_until, end)
    span = busy_until - begin
    return Idle(sum(gaps) / span, sum(gap for gap in gaps if gap > BETWEEN_STEPS_US) / span, span)


def intervals(trace: profile) -> list[Interval]:
    """When the device was busy, in microseconds."""
    return [(each.start, each.end) for each in kernels(trace)]


def trace_decode(engine: Engine, prompts: list[list[int]], num_steps: int) -> profile:
    """The profile of so many steps in which requests with these prompts decode, all of them."""
    _prefill(engine, prompts)
    _profiled(engine, 4)  # where the profiler's own start is
    trace = _profiled(engine, num_steps)
    engine.abort_all()
    while engine.has_work:
        engine.step()
    return trace


def _prefill(engine: Engine, prompts: list[list[int]]) -> None:
    """Submit the prompts and step until each has its first token. None ends by itself before the last one has begun."""
    longest = max(map(len, prompts))
    params = SamplingParams(max_tokens=engine.info.max_model_len - longest, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(request_id=str(number), prompt_token_ids=prompt, params=params))
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun |= {delta.request_id for delta in engine.step().deltas if delta.token_ids}


def _profiled(engine: Engine, num_steps: int) -> profile:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    return trace


class Ran(NamedTuple):
    """When a kernel ran, in microseconds, and on which stream."""

    stream: int
    name: str
    start: float
    end: float


def kernels(trace: profile) -> list[Ran]:
    """All of them, copies and fills among them."""
    return [
        Ran(event.device_resource_id, event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def stream_table(ran: Iterable[Ran], num_steps: int, most_rows: int = 25) -> str:
    """By stream, the busiest first: what ran on it in a step, and how long it was idle before such a kernel, which says
    what it waited for. Kernels of one graph's branch have a stream of their own."""
    streams: dict[int, dict[str, list[float]]] = {}
    ends: dict[int, float] = {}
    for each in sorted(ran, key=lambda one: one.start):
        row = streams.setdefault(each.stream, {}).setdefault(each.name, [0, 0.0, 0.0, 0.0])
        before = max(each.start - ends.get(each.stream, each.start), 0.0)
        ends[each.stream] = each.end
        row[:] = row[0] + 1, row[1] + each.end - each.start, row[2] + before, max(row[3], before)
    lines = ["| stream | kernel | a step | busy us | idle before us | longest |", "|---|---|---|---|---|---|"]
    for stream, rows in sorted(streams.items(), key=lambda item: -sum(row[1] for row in item[1].values())):
        busiest = sorted(rows.items(), key=lambda item: -item[1][1] - item[1][2])
        for name, (count, busy, idle, longest) in busiest[:most_rows]:
            numbers = f"{count / num_steps:.1f} | {busy / num_steps:.1f} | {idle / num_steps:.1f} | {longest:.1f}"
            lines.append(f"| {stream} | {name[:60]} | {numbers} |")
    return "\n".join(lines)


def kernel_table(trace: profile) -> str:
    """The kernels by the time that they took in all."""
    return trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=100)
