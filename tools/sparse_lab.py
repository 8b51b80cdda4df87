"""One sequence on the engine's runner, without a scheduler: what is written stands in plans made by hand.

Owns: pages, host blocks and plans of one lane. Used by experiments, which choose each token themselves, and by tests.
On a GPU the host blocks are there as well, since the torch references of the kernels read them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.core import Engine
from minserve.engine.plan import Chunk, Demotion, Fetched, LaneSetup, Sample, SparsePolicy, StepPlan, StepResult
from minserve.kernels.accept_drafts import Limits, accept_drafts
from minserve.kernels.fp8 import FP8
from minserve.kernels.sampling import draw
from minserve.kernels.sparse_rows import RING
from minserve.lookahead.background import Background, Chosen, Entries
from minserve.lookahead.pipeline import Lookahead
from minserve.memory.host_pool import store_block
from minserve.memory.lanes import Lanes
from minserve.memory.pages import zeros
from minserve.memory.transfer import to_device
from minserve.memory.working_sets import Memory, WorkingSets
from minserve.protocol import SamplingParams
from minserve.runner.decode import Decode
from minserve.runner.runner import Runner
from minserve.runner.sampler import Sampler
from minserve.spec.draft import Drafter


class Step(NamedTuple):
    """What a step of one lane gave. tokens: none if it has to run again; drawn: what each row drew, whether it counts
    or not; drafts: those that stood behind the lane's last token."""

    tokens: list[int]
    fetched: Fetched | None
    drawn: list[int]
    drafts: list[int]


class Snapshot(NamedTuple):
    """A resident lane, to return to. tables: the contents of `SparseLab._tables`."""

    tables: list[torch.Tensor]
    token_ids: list[int]
    num_drafts: int


class ForcedSampler(Sampler):
    """A sampler that can be told what it draws. One lane.

    forced: what the first rows draw, whatever the model says. logits: those of the last step, [rows, vocab] float32;
    drawn: what its rows drew, [rows] int64.
    """

    def __init__(self, lanes: Lanes, allowed: torch.Tensor | None) -> None:
        self._lanes, self._allowed = lanes, allowed
        self.forced: Sequence[int] = ()

    def sample(
        self, logits: torch.Tensor, lane_ids: torch.Tensor, *, adjusted: bool, limits: Limits | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.logits, lanes = logits.float(), self._lanes
        tokens = draw(logits, lane_ids, lanes.sampling, self._allowed)
        forced = to_device(list(self.forced[: len(tokens)]), torch.int64, tokens.device)
        tokens[: len(forced)] = forced
        self.drawn = tokens
        counts = accept_drafts(tokens, lane_ids, lanes.drafts, lanes.last_token, lanes.num_tokens, limits)
        return tokens[None], counts


class WatchedBackground(Background):
    """Keeps what it ranked last, for whoever wants to see it. wanted: [layers, 2, kv_heads, blocks] bool, of one lane;
    ring_start: the first block in its ring; lacking: what its step decided by whether to run again."""

    wanted: torch.Tensor
    ring_start: int
    lacking: float

    def _fetch(self, entries: Entries) -> Chosen:
        chosen = super()._fetch(entries)
        self.wanted, self.ring_start = torch.cat(chosen.wanted), int(entries.ring.start)
        self.lacking = float(chosen.lacking.mean())
        return chosen


class SparseLab:
    """engine: nobody is in it. Takes its lane 0, its first pages, and its first host blocks if it has working sets;
    where it has none, or others are wanted, `use` makes them, with host blocks of host_dtype: that of the pages (None),
    or FP8.

    Greedy. num_drafts: proposed in every step, and verified as the policy says while the lane is sparse.
    """

    def __init__(
        self, engine: Engine, num_drafts: int = 0, chunk: int = 512, host_dtype: torch.dtype | None = None
    ) -> None:
        self._engine = engine  # whose host memory goes with it
        self._old, self.lanes = engine._runner, engine._lanes
        self.kv: torch.Tensor = self._old._context.kv
        self.sampler = ForcedSampler(self.lanes, self._old._sampler._allowed)
        self.num_drafts, self._chunk = num_drafts, chunk
        self._vocab_size = engine.info.vocab_size
        self._step = self._proposed = 0
        self._policy: SparsePolicy | None = None
        self.token_ids: list[int] = []
        self._num_stored = self._num_copied = 0
        self._host: Memory | None = None
        self._host_dtype = host_dtype or self.kv.dtype
        if (lookahead := self._old._steps.lookahead) is not None:
            self._run_with(lookahead.sets, recalls=lookahead.recalls)

    def use(self, num_slots: int, *, recalls: bool = False) -> None:
        """Working sets of so many slots from now on. A lane that is sparse is so no more, and is to be read again, or
        restored."""
        if self._host is None:
            num_layers, num_pages, *rest = self.kv.shape
            shape, device = (num_pages, num_layers, *rest), self.kv.device.type
            scales = zeros(shape[:4], torch.float32, device) if self._host_dtype == FP8 else None
            self._host = Memory(zeros(shape, self._host_dtype, device), scales)
        num_heads = self._old._context.num_heads
        sets = WorkingSets(Memory(self.kv), self._host, self.lanes, num_heads, num_slots)
        self._run_with(sets, recalls=recalls)

    def _run_with(self, sets: WorkingSets, *, recalls: bool, **options: Any) -> None:
        """options: of the lookahead."""
        old = self._old
        self.sets = sets
        self.lookahead = Lookahead(sets, recalls=recalls, background=WatchedBackground, **options)
        drafter, sampler = old._drafter, self.sampler
        steps = Decode(old._model, old._context, self.lanes, sampler, drafter, self.lookahead)
        self.runner = Runner(old._model, old._context, sampler, steps, steps, drafter, old._shapes)

    # ---- to go on twice from one place ----

    def snapshot(self) -> Snapshot:
        """Of a lane that is resident, and whose last step was a decode."""
        assert self._policy is None, "a sparse lane has more than a snapshot holds"
        return Snapshot([table.clone() for table in self._tables()], list(self.token_ids), self._proposed)

    def restore(self, snapshot: Snapshot) -> None:
        """Resident, with the text that it had. The working sets may be others."""
        with torch.inference_mode():
            self.token_ids = list(snapshot.token_ids)
            for table, saved in zip(self._tables(), snapshot.tables, strict=True):
                table.copy_(saved)
            self.sets.sparse.zero_()
            self.sets.maps.slot_block.fill_(-1)
        self._policy, self._proposed = None, min(snapshot.num_drafts, self.num_drafts)

    def _tables(self) -> list[torch.Tensor]:
        """All that a resident lane reads and later steps write."""
        drafter = self._old._drafter
        own = [value for value in vars(self.lanes).values() if isinstance(value, torch.Tensor)]
        drafts = [drafter._kv.kv] if isinstance(drafter, Drafter) else []
        num_pages = -(-len(self.token_ids) // BLOCK_SIZE)
        return [self.kv[:, :num_pages], self.sets.queries, *own, *drafts]

    # ---- a resident lane ----

    def read(self, token_ids: Sequence[int], max_tokens: int, forced: Sequence[int] = ()) -> int:
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

    def decode(
        self,
        forced: Sequence[int] = (),
        refill: int = 10**6,
        saved: int | None = None,
        drafts: Sequence[int] | None = None,
    ) -> Step:
        """One step. forced: see `ForcedSampler`. refill: blocks that the lane may fetch more in each layer; saved: how
        much of that it may have at most, if not just that. drafts: in place of those that were proposed."""
        self.sampler.forced = forced
        if drafts is not None:
            device = self.lanes.device
            self.lanes.set_drafts(
                torch.zeros(1, dtype=torch.int64, device=device), list(torch.tensor([drafts]).T.to(device))
            )
            self._proposed = len(drafts)
        standing = self.lanes.drafts[0, : self._proposed].tolist()
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
            refills=[(0, refill, refill if saved is None else saved)] if is_sparse else (),
        )
        result = self._run(plan)
        tokens = list(result.token_ids[0])
        fetched = result.fetched[0] if result.fetched else None
        self.token_ids += tokens
        return Step(tokens, fetched, self.sampler.drawn.tolist(), standing)

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
        store_block(self.sets.kv[:, page], self.sets.host, self.sets.host_scales, host)

    def _plan(self, **fields: object) -> StepPlan:
        self._step += 1
        return StepPlan(step=self._step, **fields)  # type: ignore[arg-type]

    def _run(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode():
            self.lanes.prepare(plan)
        self._proposed = plan.num_proposals
        result = self.runner.run(plan).result()
        self.runner.settle()
        return result
