"""One sequence on the engine's runner, without a scheduler: what is written stands in plans made by hand.

Owns: pages, host blocks and plans of one lane. Used by experiments, which choose each token themselves, and by tests.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.core import Engine
from minserve.engine.plan import Chunk, Demotion, Fetched, LaneSetup, Sample, SparsePolicy, StepPlan, StepResult
from minserve.kernels.sparse_rows import RING
from minserve.memory.working_sets import WorkingSets
from minserve.protocol import SamplingParams
from minserve.runner.sampler import Sampler


class Step(NamedTuple):
    """What a step of one lane gave. tokens: none if it has to run again."""

    tokens: list[int]
    fetched: Fetched | None


class ForcedSampler(Sampler):
    """A sampler that can be told what it draws. forced: the next token of every row, and no draft is accepted; None:
    what the model says. logits: those of the last step, [rows, vocab] float32."""

    forced: int | None = None

    def sample(
        self, logits: torch.Tensor, lane_ids: torch.Tensor, *, adjusted: bool, most: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.logits = logits.float()
        if self.forced is None:
            return super().sample(logits, lane_ids, adjusted=adjusted, most=most)
        counts = torch.ones_like(lane_ids) if most is None else most.clamp_max(1)
        lanes = self._lanes
        lanes.last_token[lane_ids] = torch.where(counts > 0, self.forced, lanes.last_token[lane_ids])
        lanes.num_tokens[lane_ids] += counts
        return torch.full((len(lane_ids), len(logits) // len(lane_ids)), self.forced), counts


class SparseLab:
    """engine: with working sets, and nobody in it. Takes its lane 0, its first pages and its first host blocks.

    Greedy. num_drafts: proposed in every step, and verified as the policy says while the lane is sparse.
    """

    def __init__(self, engine: Engine, num_drafts: int = 0, chunk: int = 512) -> None:
        self.runner, self.lanes = engine._runner, engine._lanes
        sets = self.runner._working_sets
        assert sets is not None, "this engine has no working sets"
        self.sets: WorkingSets = sets
        old = self.runner._sampler
        self.sampler = ForcedSampler(self.lanes, engine.info.vocab_size, ())
        self.sampler._allowed = old._allowed
        self.runner._sampler = self.runner._steps._sampler = self.sampler
        self.num_drafts, self._chunk = num_drafts, chunk
        self._vocab_size = engine.info.vocab_size
        self._step = 0
        self._policy: SparsePolicy | None = None
        self.token_ids: list[int] = []
        self._num_stored = self._num_copied = 0

    # ---- a resident lane ----

    def read(self, token_ids: Sequence[int], max_tokens: int, forced: int | None = None) -> int:
        """A prompt, and the token that follows it. forced: see `ForcedSampler`."""
        self.sampler.forced = forced
        self.token_ids, self._policy, self._num_stored = list(token_ids), None, 0
        num_blocks = -(-(len(token_ids) + max_tokens) // BLOCK_SIZE)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        setup = LaneSetup(
            lane=0,
            params=params,
            token_ids=(),
            num_tokens=len(token_ids),
            start=0,
            end=len(token_ids) + max_tokens,
            num_prompt_tokens=len(token_ids),
            end_token_ids=(),
            last_token=token_ids[-1],
            penalized=False,
            constrained=False,
        )
        pages = [(0, 0, tuple(range(num_blocks)))]
        for start in range(0, len(token_ids), self._chunk):
            own = list(token_ids[start : start + self._chunk])
            end = start + len(own)
            samples = end == len(token_ids)
            following = -1 if samples else token_ids[end]
            chunk = Chunk(lane=0, start=start, token_ids=own, samples=samples, following=following)
            plan = self._plan(
                setups=[setup] if start == 0 else (),
                new_pages=pages if start == 0 else (),
                chunks=[chunk],
                samples=[Sample(lane=0, logprobs=None, adjusted=False)] if samples else (),
                num_proposals=self.num_drafts if samples else 0,
            )
            result = self._run(plan)
        token = result.token_ids[0][0]
        self.token_ids.append(token)
        return token

    def demote(self, policy: SparsePolicy) -> None:
        """Before the next step. The last one was a decode."""
        num_tokens, num_slots = len(self.token_ids), self.sets.num_slots
        start = max((num_tokens - 1) // BLOCK_SIZE - 1, 0)
        num_blocks = (num_tokens - 1) // BLOCK_SIZE + 1
        for block in range(num_blocks - 1):
            self._store_page(block, block)
        pages = list(range(num_blocks))
        slots = list(range(num_slots))
        local = list(range(max(num_blocks, num_slots), max(num_blocks, num_slots) + RING))
        ring = [local[0]] * RING
        copies = []
        for number, block in enumerate(range(start, start + RING)):
            ring[block % RING] = local[number]
            if block < num_blocks:
                copies.append((pages[block], local[number]))
        self._policy = policy
        self._num_stored, self._num_copied = start, num_blocks - 1
        self._demotion = Demotion(
            lane=0,
            policy=policy,
            num_tokens=num_tokens,
            pages=pages,
            slot_pages=slots,
            slot_blocks=[slot if slot < min(start, num_slots) else -1 for slot in slots],
            ring_pages=ring,
            ring_copies=copies,
            host_blocks=list(range(start)),
        )
        self._ring = ring
        self._pending: Demotion | None = self._demotion

    # ---- steps ----

    def decode(self, forced: int | None = None, refill: int = 10**6) -> Step:
        """One step. forced: see `ForcedSampler`."""
        self.sampler.forced = forced
        is_sparse = self._policy is not None
        demotions = []
        if is_sparse and self._pending is not None:
            demotions, self._pending = [self._pending], None
        stored = self._store() if is_sparse else []
        plan = self._plan(
            decodes=[0],
            samples=[Sample(lane=0, logprobs=None, adjusted=False)],
            num_drafts=self._proposed,
            num_proposals=self.num_drafts,
            keeps_queries=True,
            demotions=demotions,
            stored=stored,
            refills=[(0, refill, refill)] if is_sparse else (),
        )
        result = self._run(plan)
        tokens = list(result.token_ids[0])
        fetched = result.fetched[0] if result.fetched else None
        self.token_ids += tokens
        return Step(tokens, fetched)

    def _store(self) -> list[tuple[int, int, int]]:
        """Full blocks that have no host block yet."""
        stored = []
        for block in range(self._num_stored, (len(self.token_ids) - 1) // BLOCK_SIZE):
            if block >= self._num_copied:
                self._store_page(self._ring[block % RING], block)
            stored.append((0, block, block))
        self._num_stored += len(stored)
        return stored

    def _store_page(self, page: int, host: int) -> None:
        self.sets.host[host].copy_(self.sets.kv[:, page])

    def _plan(self, **fields: object) -> StepPlan:
        self._step += 1
        return StepPlan(step=self._step, **fields)  # type: ignore[arg-type]

    def _run(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode():
            self.lanes.prepare(plan)
        self._proposed = plan.num_proposals
        return self.runner.run(plan).result()
