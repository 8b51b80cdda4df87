"""Runs a step's plan on the model.

Owns: the order of a step's work, and the way of its results to the host. Does not know: requests, the queue, who owns
a page.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from minserve.engine.plan import Chunk, Sample, StepPlan, StepResult
from minserve.memory.transfer import to_device, to_host
from minserve.models.causal_lm import CausalLM
from minserve.protocol import TokenLogprobs
from minserve.runner.attention import KVContext
from minserve.runner.logprobs import Logprobs
from minserve.runner.prefill import FlashShapes, PrefillAttention
from minserve.runner.sampler import Sampler

LOGIT_ROWS = 128
"""Prompt rows whose logits are held at once, when a prompt's log probabilities are wanted: 128 x 152K x 4 B = 78 MB."""


class DecodeRunner(Protocol):
    """`Decode` or `DecodeGraphs`."""

    def run(self, lanes: Sequence[int], *, adjusted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [rows, vocab], tokens [rows] int64) of a decode step of these lanes."""


class Runner:
    """The only object that runs the model. Plans are run in the order in which they come.

    shapes: those that prefill is cut into, or None (see `PrefillAttention`).
    """

    def __init__(
        self,
        model: CausalLM,
        context: KVContext,
        sampler: Sampler,
        decode: DecodeRunner,
        shapes: FlashShapes | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._sampler = sampler
        self._decode = decode
        self._shapes = shapes

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> "RunningStep":
        """Launch a step. The next one finds its tokens in the lanes; the host finds them in the result."""
        step = RunningStep(plan.step)
        num_prefilled = len(plan.samples) - len(plan.rows)
        if plan.chunks:
            self._prefill(plan.chunks, plan.samples[:num_prefilled], step)
        if plan.rows:
            samples = plan.samples[num_prefilled:]
            lanes, adjusted = [row.lane for row in plan.rows], any(sample.adjusted for sample in samples)
            logits, tokens = self._decode.run(lanes, adjusted=adjusted)
            self._report(logits, tokens, samples, step)
        step.launched(self._context.kv.device)
        return step

    def _prefill(self, chunks: Sequence[Chunk], samples: Sequence[Sample], step: "RunningStep") -> None:
        device = self._context.kv.device
        attend = PrefillAttention(self._context, chunks, self._shapes)
        token_ids = to_device([id for chunk in chunks for id in chunk.token_ids], torch.int64, device)
        hidden = torch.split(self._model(token_ids, attend), [len(chunk.token_ids) for chunk in chunks])
        for chunk, rows in zip(chunks, hidden, strict=True):
            step.prompt_logprobs.append(self._prompt_logprobs(chunk, rows))
        if samples:
            last = torch.cat([rows[-1:] for chunk, rows in zip(chunks, hidden, strict=True) if chunk.samples])
            lane_ids = to_device([sample.lane for sample in samples], torch.int64, device)
            logits = self._model.logits(last)
            adjusted = any(sample.adjusted for sample in samples)
            self._report(logits, self._sampler.sample(logits, lane_ids, adjusted=adjusted), samples, step)

    def _prompt_logprobs(self, chunk: Chunk, hidden: torch.Tensor) -> list[Logprobs]:
        """What the chunk says of the prompt tokens after its rows."""
        if not chunk.prompt_targets:
            return []
        targets = to_device(chunk.prompt_targets, torch.int64, hidden.device)
        split = (torch.split(tensor, LOGIT_ROWS) for tensor in (hidden[: len(targets)], targets))
        return [
            Logprobs.of(self._sampler.masked(self._model.logits(rows)), wanted, [chunk.prompt_logprobs] * len(wanted))
            for rows, wanted in zip(*split, strict=True)
        ]

    def _report(
        self, logits: torch.Tensor, tokens: torch.Tensor, samples: Sequence[Sample], step: "RunningStep"
    ) -> None:
        """Send the tokens to the host, and their log probabilities where they are wanted."""
        rows = [row for row, sample in enumerate(samples) if sample.logprobs is not None]
        logprobs = None
        if rows:
            at = to_device(rows, torch.int64, logits.device)
            num_top = [samples[row].logprobs or 0 for row in rows]
            logprobs = Logprobs.of(self._sampler.masked(logits[at]), tokens[at], num_top)
        step.add(to_host(tokens), rows, logprobs)


class RunningStep:
    """A launched step. On a GPU it may still be running; `result` waits for it, but not for those launched after it."""

    def __init__(self, step: int) -> None:
        self.prompt_logprobs: list[list[Logprobs]] = []
        self._step = step
        self._parts: list[tuple[torch.Tensor, Sequence[int], Logprobs | None]] = []
        self._arrived: torch.cuda.Event | None = None

    def add(self, tokens: torch.Tensor, rows: Sequence[int], logprobs: Logprobs | None) -> None:
        """Tokens that are on their way to the host, and log probabilities of some of their rows."""
        self._parts.append((tokens, rows, logprobs))

    def launched(self, device: torch.device) -> None:
        """All of the step is in the stream, its results' copies too; those of the next step will come after them."""
        if device.type == "cuda":
            self._arrived = torch.cuda.current_stream(device).record_event()

    def result(self) -> StepResult:
        """What the step yielded, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: list[int] = []
        reports: list[TokenLogprobs | None] = []
        for tokens, rows, logprobs in self._parts:
            own: list[TokenLogprobs | None] = [None] * len(tokens)
            if logprobs is not None:
                for row, entry in zip(rows, logprobs.entries(), strict=True):
                    own[row] = entry
            token_ids += tokens.tolist()
            reports += own
        prompt = [[entry for part in parts for entry in part.entries()] for parts in self.prompt_logprobs]
        return StepResult(self._step, token_ids, reports, prompt)
