"""Runs a step's plan on the model.

Owns: the order of a step's work, and the way of its results to the host. Does not know: requests, the queue, who owns
a page.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from minserve.engine.plan import Chunk, Fetched, Sample, StepPlan, StepResult
from minserve.memory.transfer import to_device, to_host
from minserve.models.causal_lm import AuxStates, CausalLM
from minserve.protocol import TokenLogprobs
from minserve.runner.attention import KVContext
from minserve.runner.decode import Decode, Decoded, StepKind, new_aux
from minserve.runner.logprobs import Logprobs
from minserve.runner.prefill import FlashShapes, PrefillAttention
from minserve.runner.sampler import Sampler
from minserve.spec.draft import Drafter, NoDrafter

LOGIT_ROWS = 128
"""Rows whose log probabilities are worked out at once: 128 x 152K x 4 B = 78 MB, several times over."""


class DecodeRunner(Protocol):
    """`Decode` or `DecodeGraphs`."""

    def run(self, lanes: Sequence[int], kind: StepKind) -> Decoded:
        """A decode step of these lanes."""


class Runner:
    """The only object that runs the model. Plans are run in the order in which they come.

    steps: the parts of a decode, for steps that also read prompts; decode: whole ones, which may be recorded.
    shapes: those that prefill is cut into, or None (see `PrefillAttention`).
    """

    def __init__(
        self,
        model: CausalLM,
        context: KVContext,
        sampler: Sampler,
        steps: Decode,
        decode: DecodeRunner,
        drafter: Drafter | NoDrafter,
        shapes: FlashShapes | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._sampler = sampler
        self._steps = steps
        self._decode = decode
        self._drafter = drafter
        self._shapes = shapes

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> "RunningStep":
        """Launch a step. The next one finds its tokens in the lanes; the host finds them in the result."""
        step = RunningStep(plan.step)
        if plan.setups:
            self._drafter.forget([setup.lane for setup in plan.setups])
        if self._steps.lookahead is not None:
            self._steps.lookahead.prepare(plan)
        if plan.chunks:
            self._read_prompts(plan, step)
        elif plan.decodes:
            self._report(self._decode.run(plan.decodes, _kind(plan)), plan.samples, step)
        if plan.masked and plan.num_proposals:
            step.drafts = to_host(self._steps.drafts_of(plan.masked))
        step.launched(self._context.kv.device)
        return step

    def settle(self) -> None:
        """Wait until nothing goes on in the background of the last step."""
        if self._steps.lookahead is not None:
            self._steps.lookahead.settle()

    def _read_prompts(self, plan: StepPlan, step: "RunningStep") -> None:
        """Chunks, and decodes in the same pass: the model's weights are read once for both."""
        chunks, device = plan.chunks, self._context.kv.device
        token_ids = to_device([id for chunk in chunks for id in chunk.token_ids], torch.int64, device)
        num_read, num_sampling = len(token_ids), len(plan.samples) - len(plan.decodes)
        lane_ids = to_device([sample.lane for sample in plan.samples], torch.int64, device)
        # A tensor of its own begins at 16 bytes: kernels are compiled for that.
        own, decoding = lane_ids[:num_sampling], lane_ids[num_sampling:].clone()
        attend_decodes = None
        if plan.decodes:
            rows = self._steps.rows(decoding, plan.num_drafts, keeps_queries=plan.keeps_queries)
            attend_decodes = rows.attend
            token_ids = torch.cat([token_ids, rows.token_ids])
        attend = PrefillAttention(self._context, chunks, self._shapes, attend_decodes)
        aux = new_aux(self._drafter, self._model, len(token_ids), self._context.kv)
        logits = self._model.logits(self._states(chunks, token_ids, attend, aux, step))
        if not num_sampling:
            self._drafter.read(chunks, aux[:num_read], token_ids[:0])
        else:
            adjusted = any(sample.adjusted for sample in plan.samples[:num_sampling])
            tokens, counts = self._sampler.sample(logits[:num_sampling], own, adjusted=adjusted)
            self._report(Decoded(logits, tokens, counts), plan.samples[:num_sampling], step)
            self._drafter.read(chunks, aux[:num_read], tokens[:, 0])
            self._drafter.propose(aux[attend.wanted[:num_sampling]], tokens, counts, own, plan.num_proposals)
        if plan.decodes:
            decoded = self._steps.finish(logits[num_sampling:], decoding, aux[num_read:], _kind(plan))
            self._report(decoded, plan.samples[num_sampling:], step)

    def _states(
        self,
        chunks: Sequence[Chunk],
        token_ids: torch.Tensor,
        attend: PrefillAttention,
        aux: torch.Tensor,
        step: "RunningStep",
    ) -> torch.Tensor:
        """The model's states of the rows that something follows. Those of others are of use only if prompts' log
        probabilities are wanted, or the drafter reads what the last layer puts out."""
        layers = self._drafter.aux_layers
        if not any(chunk.prompt_targets for chunk in chunks) and self._model.config.num_layers not in layers:
            step.prompt_logprobs += [[] for _ in chunks]
            return self._model(token_ids, attend, AuxStates(layers, aux), attend)
        states = self._model(token_ids, attend, AuxStates(layers, aux))
        begin = 0
        for chunk in chunks:
            step.prompt_logprobs.append(self._prompt_logprobs(chunk, states[begin : begin + len(chunk.token_ids)]))
            begin += len(chunk.token_ids)
        return states[attend.wanted]

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

    def _report(self, decoded: Decoded, samples: Sequence[Sample], step: "RunningStep") -> None:
        """Send tokens to the host, and their log probabilities where they are wanted."""
        num_rows = decoded.tokens.shape[1]
        lanes = [number for number, sample in enumerate(samples) if sample.logprobs is not None]
        rows = [(number * num_rows + row, samples[number].logprobs or 0) for number in lanes for row in range(num_rows)]
        logprobs = []
        for begin in range(0, len(rows), LOGIT_ROWS):
            own, num_top = zip(*rows[begin : begin + LOGIT_ROWS], strict=True)
            at = to_device(own, torch.int64, decoded.logits.device)
            logits = self._sampler.masked(decoded.logits[at])
            logprobs.append(Logprobs.of(logits, decoded.tokens.flatten()[at], num_top))
        fetched = None if decoded.fetched is None else to_host(decoded.fetched)
        step.parts.append(Part(to_host(decoded.tokens), to_host(decoded.counts), lanes, logprobs, fetched))


def _kind(plan: StepPlan) -> StepKind:
    samples = plan.samples[len(plan.samples) - len(plan.decodes) :]
    adjusted = any(sample.adjusted for sample in samples)
    return StepKind(plan.num_drafts, plan.num_proposals, adjusted, plan.keeps_queries)


class Part(NamedTuple):
    """Part of a step's result, on its way to the host. tokens: [lanes, rows]; counts: [lanes], how many of each are
    text; logprobs: of all rows of some of the lanes; fetched: as in `Decoded`."""

    tokens: torch.Tensor
    counts: torch.Tensor
    reported: Sequence[int]
    logprobs: Sequence[Logprobs]
    fetched: torch.Tensor | None

    def text(self) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """Each lane's tokens, and their log probabilities if these were wanted."""
        counts = self.counts.tolist()
        token_ids = [own[:count] for own, count in zip(self.tokens.tolist(), counts, strict=True)]
        reports: list[list[TokenLogprobs] | None] = [None] * len(counts)
        entries = [entry for logprobs in self.logprobs for entry in logprobs.entries()]
        num_rows = self.tokens.shape[1]
        for number, lane in enumerate(self.reported):
            reports[lane] = entries[number * num_rows :][: counts[lane]]
        return token_ids, reports


class RunningStep:
    """A launched step. On a GPU it may still be running; `result` waits for it, but not for those launched after it."""

    def __init__(self, step: int) -> None:
        self.parts: list[Part] = []
        self.prompt_logprobs: list[list[Logprobs]] = []
        self.drafts: torch.Tensor | None = None
        self._step = step
        self._arrived: torch.cuda.Event | None = None

    def launched(self, device: torch.device) -> None:
        """All of the step is in the stream, its results' copies too; those of the next step will come after them."""
        if device.type == "cuda":
            self._arrived = torch.cuda.current_stream(device).record_event()

    def result(self) -> StepResult:
        """What the step yielded, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: list[list[int]] = []
        reports: list[list[TokenLogprobs] | None] = []
        for part in self.parts:
            own, logprobs = part.text()
            token_ids += own
            reports += logprobs
        prompt = [[entry for part in parts for entry in part.entries()] for parts in self.prompt_logprobs]
        drafts = () if self.drafts is None else self.drafts.tolist()
        fetched = [Fetched(*own) for part in self.parts if part.fetched is not None for own in part.fetched.tolist()]
        return StepResult(self._step, token_ids, reports, prompt, drafts=drafts, fetched=fetched)
