"""What the two halves of a step pay for being tied together, by the kinds of signals, on an idle and on a busy link.

python -m tests.gpu.signals        half a minute on a GPU

The foreground is eight groups of layers, each of which waits for what was fetched for it, multiplies by 200 MB of
weights, and says that it has attended; the background does next to nothing. So what a step takes beyond one without any
signals is what the foreground pays for a pair of them, each group's wait and record; products that find an SM taken by
a warp that waits are in it. A busy link is kept so by the kernel that fetches, beside it all.

gates: as flags, but the background waits by the driver (cuStreamWaitValue32 on the GPU's memory), which takes no SM.
"""

import ctypes
import time
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F

from minserve.kernels.fetch_blocks import copy_pieces
from minserve.lookahead.order import Order, _CudaStreams
from minserve.runner.graphs import CudaRecorder

GROUPS, STEPS, PIECES, LOADS = 8, 20, 2**15, 60
KINDS = ("none", "events", "mixed", "flags", "gates")
GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ


class Gate:
    """Closed when a foreground begins, and open when it has recorded."""

    driver = None

    def __init__(self, is_open):
        self.is_open = is_open

    def record(self):
        self.is_open.fill_(1)

    def wait(self):
        Gate.driver = Gate.driver or ctypes.CDLL("libcuda.so.1")
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(self.is_open.data_ptr())
        failed = self.driver.cuStreamWaitValue32_v2(stream, address, ctypes.c_uint32(1), GREATER_OR_EQUAL)
        assert not failed, f"cuStreamWaitValue32: error {failed}"


class Steps:
    """The parts of a step as graphs, as the runner launches them. work: of a group."""

    def __init__(self, kind, device, work):
        self.gates = torch.zeros(GROUPS, dtype=torch.int32, device=device)
        if kind == "none":
            self.order = replace(Order.of(torch.device("cpu"), GROUPS), streams=_CudaStreams(device))
        elif kind == "gates":
            gates = [Gate(gate) for gate in self.gates]
            self.order = replace(Order.of(device, GROUPS, "flags"), attended=gates)
        else:
            self.order = Order.of(device, GROUPS, kind)
        self.work, self.touched = work, torch.zeros(2, 1, device=device)
        self.order.foreground()
        record = CudaRecorder()
        self.ahead = record(self.foreground)
        with self.order.background():
            self.aside = CudaRecorder()(self.background)
        self.behind = record(self.sample)

    def foreground(self):
        self.gates.zero_()
        self.order.begun.record()
        for group in range(GROUPS):
            self.order.fetched[group].wait()
            self.work(group)
            self.order.attended[group].record()

    def background(self):
        self.order.begun.wait()
        for group in range(GROUPS):
            self.order.attended[group].wait()
            self.touched[0].add_(1)
        self.order.ranked.record()
        for group in range(GROUPS):
            self.touched[0].add_(1)
            self.order.fetched[group].record()

    def sample(self):
        self.order.ranked.wait()
        self.touched[1].add_(1)

    def run(self):
        self.order.foreground()
        self.ahead.replay()
        with self.order.background():
            self.aside.replay()
        self.behind.replay()


class Link:
    """Something to fetch."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device, priority=-5)
        self.host = torch.empty(2**16, 2, 16, 128, dtype=torch.bfloat16, pin_memory=True)
        self.kv = torch.empty(PIECES, 2, 16, 128, dtype=torch.bfloat16, device=device)
        sources = torch.randint(len(self.host), (PIECES,), device=device)
        self.copies = torch.stack((sources, torch.arange(PIECES, device=device)), dim=1)
        self.num_copies = torch.full((1,), PIECES, dtype=torch.int32, device=device)

    def fill(self):
        """Keep it busy for a third of a second. Returns the end of that."""
        with torch.cuda.stream(self.stream):
            for _ in range(LOADS):
                copy_pieces(self.copies, self.num_copies, self.host, None, self.kv)
            return self.stream.record_event()


def step_us(steps, link):
    """Of the foreground. link: None: idle."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    steps.run()
    torch.cuda.synchronize()
    filled = link.fill() if link is not None else None
    time.sleep(0.01)
    begin.record()
    for _ in range(STEPS):
        steps.run()
    end.record()
    end.synchronize()
    assert filled is None or not filled.query(), "the link was idle before the end"
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / STEPS


@torch.inference_mode()
def main():
    device = torch.device("cuda")
    link = Link(device)
    link.fill()
    weights = torch.randn(GROUPS, 24576, 4096, dtype=torch.bfloat16, device=device)
    without = {}
    for kind, rows in product(KINDS, (1, 8, 230)):
        x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=device)
        try:
            steps = Steps(kind, device, lambda group, x=x: F.linear(x, weights[group]))
            for name, busy in (("idle", None), ("busy", link)):
                found = sorted(step_us(steps, busy) for _ in range(3))[1]
                pair = (found - without.setdefault((rows, name), found)) / GROUPS
                print(f"{kind:6}, {rows:3} rows, link {name}: {found:8.1f} us a step, {pair:6.1f} a pair", flush=True)
        except Exception as error:  # the driver may not have it
            print(f"{kind:6}, {rows:3} rows: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
