"""One decode step as a function of device tensors alone, run as it stands or replayed from CUDA graphs.

Owns: the order of a decode step, its graphs and their buffers. Does not know: plans, requests, the queue.

A step reads which lanes take part and finds all else in the lanes' tables: last tokens, lengths, pages, sampling state.
So nothing in it depends on values that the host knows, and a graph that was captured once serves every step of its
size. Sampling is a graph of its own, in two variants: most steps adjust nobody's logits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.step_inputs import step_inputs
from minserve.memory.lanes import Lanes
from minserve.memory.transfer import to_device
from minserve.models.causal_lm import CausalLM
from minserve.runner.attention import DecodeAttention, KVContext
from minserve.runner.sampler import Sampler

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Batch sizes that have a graph; above the last, every multiple of 64. A step of n rows runs in the next size."""

PADDING = -1
"""The lane of a row that stands for nobody: it reads and writes nothing."""


class Decode:
    """The two halves of a step. lane_ids: [rows] int64, each lane at most once."""

    def __init__(self, model: CausalLM, context: KVContext, lanes: Lanes, sampler: Sampler) -> None:
        self._model = model
        self._context = context
        self._lanes = lanes
        self._sampler = sampler

    def forward(self, lane_ids: torch.Tensor) -> torch.Tensor:
        """Each lane's last token, at the end of its text. Returns logits [rows, vocab] in the model's dtype."""
        lanes, context = self._lanes, self._context
        inputs = step_inputs(lanes.last_token, lanes.num_tokens, context.page_table, lane_ids, BLOCK_SIZE)
        token_ids, positions, places, lengths = inputs
        attend = DecodeAttention(context, lane_ids, positions, places, lengths)
        return self._model.logits(self._model(token_ids, attend))

    def sample(self, logits: torch.Tensor, lane_ids: torch.Tensor, *, adjusted: bool) -> torch.Tensor:
        """The lanes' next tokens [rows] int64, also written to the lanes."""
        return self._sampler.sample(logits, lane_ids, adjusted=adjusted)

    def run(self, lanes: Sequence[int], *, adjusted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, tokens) of a step of these lanes. adjusted: some of them have bias, penalties or a least length."""
        lane_ids = to_device(lanes, torch.int64, self._lanes.device)
        logits = self.forward(lane_ids)
        return logits, self.sample(logits, lane_ids, adjusted=adjusted)


class Replay(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again, on what its buffers hold now."""


Recorder = Callable[[Callable[[], None]], Replay]
"""Records what a function does on the device. The function is called more than once meanwhile."""


class CudaRecorder:
    """Records CUDA graphs that share a memory pool, since no two of them run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """function: launches kernels; waits for nothing, allocates what it likes."""
        function()  # as it stands: kernels are compiled and libraries set up, which no graph may hold
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph


class DecodeGraphs:
    """The same, replayed. What `run` returns is overwritten by the next call."""

    def __init__(
        self, decode: Decode, max_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._decode = decode
        self._sizes = graph_sizes(max_rows)
        self._lane_ids = torch.full((self._sizes[-1],), PADDING, dtype=torch.int64, device=device)
        self._logits = torch.zeros(self._sizes[-1], vocab_size, dtype=dtype, device=device)
        self._tokens = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        self._forward: dict[int, Replay] = {}
        self._sample: dict[tuple[int, bool], Replay] = {}

    @torch.inference_mode()
    def capture(self, record: Recorder, progress: Callable[[int, int], None]) -> None:
        """Record every size, the largest first, so that the smaller ones find their memory in the pool. All rows are
        padding meanwhile, so nothing of the lanes is touched.

        progress: told of (sizes recorded, sizes in all).
        """
        for number, size in enumerate(reversed(self._sizes), 1):
            self._forward[size] = record(partial(self._run_forward, size))
            for adjusted in (False, True):
                self._sample[size, adjusted] = record(partial(self._run_sample, size, adjusted))
            progress(number, len(self._sizes))

    def run(self, lanes: Sequence[int], *, adjusted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As Decode.run."""
        num_rows = len(lanes)
        size = next(size for size in self._sizes if size >= num_rows)
        padded = [*lanes, *[PADDING] * (size - num_rows)]
        self._lane_ids[:size].copy_(to_device(padded, torch.int64, self._lane_ids.device))
        self._forward[size].replay()
        self._sample[size, adjusted].replay()
        return self._logits[:num_rows], self._tokens[:num_rows]

    def _run_forward(self, size: int) -> None:
        self._logits[:size].copy_(self._decode.forward(self._lane_ids[:size]))

    def _run_sample(self, size: int, adjusted: bool) -> None:
        tokens = self._decode.sample(self._logits[:size], self._lane_ids[:size], adjusted=adjusted)
        self._tokens[:size].copy_(tokens)


def graph_sizes(max_rows: int) -> list[int]:
    """The batch sizes to capture for steps of up to max_rows."""
    largest = next((size for size in SIZES if size >= max_rows), -(-max_rows // 64) * 64)
    return sorted({size for size in (*SIZES, *range(SIZES[-1], largest, 64)) if size < largest} | {largest})
