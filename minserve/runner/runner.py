"""Runs a step's plan on the model.

Owns: the model and the order of a step's work. Does not know: requests, the queue, who owns a page.
"""

from collections.abc import Sequence

import torch

from minserve.engine.plan import Chunk, Sample, StepPlan, StepResult
from minserve.memory.lanes import Lanes
from minserve.memory.pages import KVPages
from minserve.models.causal_lm import CausalLM
from minserve.protocol import TokenLogprobs
from minserve.runner.attention import DecodeAttention, PrefillAttention
from minserve.runner.sampler import Sampler, report_logprobs

LOGIT_ROWS = 128
"""Prompt rows whose logits are held at once, when a prompt's log probabilities are wanted: 128 x 152K x 4 B = 78 MB."""


class Runner:
    """The only object that runs the model. Plans are run in the order in which they come."""

    def __init__(self, model: CausalLM, pages: KVPages, lanes: Lanes, sampler: Sampler) -> None:
        self._model = model
        self._pages = pages
        self._lanes = lanes
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> "RunningStep":
        """Launch a step. The next one finds its tokens in the lanes; the host finds them in the result."""
        hidden: list[torch.Tensor] = []
        prompt_logprobs: list[list[TokenLogprobs]] = []
        if plan.chunks:
            last_rows, prompt_logprobs = self._prefill(plan.chunks)
            hidden.append(last_rows)
        if plan.rows:
            hidden.append(self._decode(plan))
        if not plan.samples:
            return RunningStep(plan, None, [], prompt_logprobs)
        logits = self._sampler.mask(self._model.logits(torch.cat(hidden)))
        tokens = self._sampler.sample(logits, plan.samples)
        return RunningStep(plan, tokens, _logprobs(logits, tokens, plan.samples), prompt_logprobs)

    def _decode(self, plan: StepPlan) -> torch.Tensor:
        attend = DecodeAttention(self._pages.kv, self._lanes.page_table, plan.rows)
        return self._model(self._lanes.last_token[attend.lanes], attend.positions, attend)

    def _prefill(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[list[TokenLogprobs]]]:
        """The hidden states of the chunks' rows that yield tokens, and what each chunk says of its prompt."""
        attend = PrefillAttention(self._pages.kv, self._lanes.page_table, chunks)
        token_ids = torch.tensor([id for chunk in chunks for id in chunk.token_ids], device=attend.positions.device)
        hidden = self._model(token_ids, attend.positions, attend)
        parts = torch.split(hidden, [len(chunk.token_ids) for chunk in chunks])
        logprobs = [self._prompt_logprobs(chunk, part) for chunk, part in zip(chunks, parts, strict=True)]
        last = [part[-1:] for chunk, part in zip(chunks, parts, strict=True) if chunk.samples]
        return torch.cat(last) if last else hidden[:0], logprobs

    def _prompt_logprobs(self, chunk: Chunk, hidden: torch.Tensor) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        targets = torch.tensor(chunk.prompt_targets, dtype=torch.int64, device=hidden.device)
        split = (torch.split(tensor, LOGIT_ROWS) for tensor in (hidden[: len(targets)], targets))
        for rows, wanted in zip(*split, strict=True):
            if len(wanted):
                logits = self._sampler.mask(self._model.logits(rows))
                entries += report_logprobs(logits, wanted, chunk.prompt_logprobs)
        return entries


class RunningStep:
    """A launched step. On a GPU it may still be running; `result` waits for it, but not for those launched after it."""

    def __init__(
        self,
        plan: StepPlan,
        tokens: torch.Tensor | None,
        logprobs: list[TokenLogprobs | None],
        prompt_logprobs: list[list[TokenLogprobs]],
    ) -> None:
        self._step = plan.step
        self._tokens = tokens
        self._arrived: torch.cuda.Event | None = None
        if tokens is not None and tokens.is_cuda:
            # Sent now, and not when they are asked for: then they would come after the next step.
            self._tokens = tokens.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.current_stream(tokens.device).record_event()
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def result(self) -> StepResult:
        """What the step yielded, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids = [] if self._tokens is None else self._tokens.tolist()
        return StepResult(self._step, token_ids, self._logprobs, self._prompt_logprobs)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, samples: Sequence[Sample]) -> list[TokenLogprobs | None]:
    reports: list[TokenLogprobs | None] = [None] * len(samples)
    rows = [row for row, sample in enumerate(samples) if sample.logprobs is not None]
    if rows:
        num_top = max(sample.logprobs or 0 for sample in samples)
        for row, entry in zip(rows, report_logprobs(logits[rows], tokens[rows], num_top), strict=True):
            reports[row] = TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[: samples[row].logprobs])
    return reports
