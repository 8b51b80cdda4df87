"""Decode steps replayed from CUDA graphs.

Owns: the graphs and their buffers. Does not know: what a step computes (decode).

Three graphs make a step: the model, sampling, and proposing drafts; and where some lane is sparse a fourth, the
background, which runs beside them. Each is captured for some batch sizes, and for the numbers of drafts that are usual;
others when they are first needed. A step of n lanes runs in the next size, and its padding exits at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from minserve.lookahead.order import Order
from minserve.memory.transfer import to_device
from minserve.runner.decode import PADDING, Decode, Decoded, StepKind

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Batch sizes that have a graph; above the last, every multiple of 64."""


class Replay(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again, on what its buffers hold now."""


Recorder = Callable[[Callable[[], None]], Replay]
"""Records what a function does on the device. The function is called meanwhile, more than once, and must launch
something; that it touches nobody is the caller's business."""


class CudaRecorder:
    """Records CUDA graphs that share a memory pool, so no two of them may run at a time. They have the priority of the
    stream that is the current one meanwhile."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """function: launches kernels; waits for nothing, allocates what it likes."""
        function()  # as it stands: kernels are compiled and libraries set up, which no graph may hold
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else current
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            function()
        return graph


class _Aside(NamedTuple):
    """Recorded work that is done again on the background's stream."""

    recorded: Replay
    order: Order

    def replay(self) -> None:
        with self.order.background():
            self.recorded.replay()


class DecodeGraphs:
    """As `Decode`. What `run` returns is overwritten by the next call.

    record, record_aside: of the background's graphs, which run at the same time as others; the former, of all others.
    max_lanes, most_drafts: the largest step; vocab_size, dtype: of the model's logits.
    """

    def __init__(
        self,
        decode: Decode,
        record: Recorder,
        record_aside: Recorder,
        *,
        max_lanes: int,
        most_drafts: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._decode, self._lookahead = decode, decode.lookahead
        self._record, self._record_aside = record, record_aside
        self._sizes = graph_sizes(max_lanes)
        largest = self._sizes[-1]
        rows = largest * (1 + most_drafts)
        self._lane_ids = torch.full((largest,), PADDING, dtype=torch.int64, device=device)
        self._logits = torch.zeros(rows, vocab_size, dtype=dtype, device=device)
        self._aux = decode.new_aux(rows).zero_()
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counts = torch.zeros(largest, dtype=torch.int64, device=device)
        self._loaded: list[int] = []
        self._graphs: dict[tuple[str | int, ...], Replay] = {}

    @torch.inference_mode()
    def capture(self, kinds: Sequence[StepKind], progress: Callable[[int, int], None]) -> None:
        """Record steps of these kinds in every size, the largest first: the others find their memory in the pool.

        progress: told of (sizes recorded, sizes in all).
        """
        for number, size in enumerate(reversed(self._sizes), 1):
            for kind in kinds:
                self._parts(size, kind)
            progress(number, len(self._sizes))

    def run(self, lanes: Sequence[int], kind: StepKind) -> Decoded:
        """As Decode.run."""
        size = next(size for size in self._sizes if size >= len(lanes))
        parts = self._parts(size, kind)
        padded = [*lanes, *[PADDING] * (size - len(lanes))]
        if padded != self._loaded:
            self._lane_ids[:size].copy_(to_device(padded, torch.int64, self._lane_ids.device))
            self._loaded = padded
        if self._lookahead is not None and kind.keeps_queries:
            self._lookahead.order.foreground()
        for part in parts:
            part.replay()
        num_rows = len(lanes) * (1 + kind.num_drafts)
        tokens = self._tokens[:num_rows].view(len(lanes), -1)
        fetched = self._lookahead.fetched(len(lanes)) if self._lookahead is not None and kind.keeps_queries else None
        return Decoded(self._logits[:num_rows], tokens, self._counts[: len(lanes)], fetched)

    def _parts(self, size: int, kind: StepKind) -> list[Replay]:
        """The graphs of such a step."""
        drafts, proposals, adjusted, keeps = kind
        parts = [self._part(("forward", size, drafts, keeps), self._forward)]
        if keeps:
            parts.append(self._background(size))
        parts.append(self._part(("sample", size, drafts, adjusted, keeps), self._sample))
        if self._decode.has_drafter:
            parts.append(self._part(("propose", size, drafts, proposals), self._propose))
        return parts

    def _part(self, key: tuple[str | int, ...], function: Callable[..., None]) -> Replay:
        if key not in self._graphs:
            self._spare_all()
            self._graphs[key] = self._record(partial(function, *key[1:]))
        return self._graphs[key]

    def _background(self, size: int) -> Replay:
        key, lookahead = ("background", size), self._lookahead
        assert lookahead is not None, "a plan keeps queries where no lane is ever sparse"
        if key not in self._graphs:
            self._spare_all()
            with lookahead.order.background():
                recorded = self._record_aside(partial(lookahead.background.run, size))
            self._graphs[key] = _Aside(recorded, lookahead.order)
        return self._graphs[key]

    def _spare_all(self) -> None:
        """Nothing of any lane is to be touched by what is recorded now."""
        self._lane_ids.fill_(PADDING)
        self._loaded = []
        if self._lookahead is not None:
            self._lookahead.forget()

    def _forward(self, size: int, num_drafts: int, keeps: bool) -> None:
        rows = size * (1 + num_drafts)
        logits = self._decode.forward(self._lane_ids[:size], num_drafts, self._aux[:rows], keeps_queries=keeps)
        self._logits[:rows].copy_(logits)

    def _sample(self, size: int, num_drafts: int, adjusted: bool, keeps: bool) -> None:
        rows = size * (1 + num_drafts)
        lanes = self._lane_ids[:size]
        tokens, counts = self._decode.sample(self._logits[:rows], lanes, adjusted=adjusted, keeps_queries=keeps)
        self._tokens[:rows].copy_(tokens.flatten())
        self._counts[:size].copy_(counts)

    def _propose(self, size: int, num_drafts: int, num_proposals: int) -> None:
        rows = size * (1 + num_drafts)
        tokens = self._tokens[:rows].view(size, -1)
        self._decode.propose(self._aux[:rows], tokens, self._counts[:size], self._lane_ids[:size], num_proposals)


def graph_sizes(max_rows: int) -> list[int]:
    """The batch sizes to capture for steps of up to max_rows."""
    largest = next((size for size in SIZES if size >= max_rows), -(-max_rows // 64) * 64)
    return sorted({size for size in (*SIZES, *range(SIZES[-1], largest, 64)) if size < largest} | {largest})
