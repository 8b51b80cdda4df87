"""Steps of fabricated lanes, launched back to back as the engine launches them, and what they did and took.

Owns: plans, the copies of full blocks to the host, and windows of time. Does not know: why these lanes.

What a scheduler would say is said here: refills by each lane's allowance, the copy of every block that became full, and
that it is stored once its copy has ended. One step is launched before the result of the last one is looked at. What a
scheduler does besides, it does not do: the host's time here is that of launching alone.
"""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.allowance import Allowance, LinkBudget, refills
from minserve.engine.plan import Fetched, Sample, SparsePolicy, StepPlan, StepResult
from minserve.kernels.sparse_rows import RING
from minserve.memory.copies import Copy, CopyEngine, StreamCopies, SyncCopies
from minserve.memory.streams import CudaStream
from minserve.runner.runner import RunningStep

from .luck import chance_for
from .rig import Rig

WORST, MEASURED, NONE = "worst", "measured", "none"
MORE_STEPS = 16
"""That `Drive.steps` may do, and what is launched too much."""


class Drafts(NamedTuple):
    """num: of a step; verified: those that it may accept, the row behind them looks ahead; tokens: of a step on
    average."""

    num: int
    verified: int
    tokens: float

    @classmethod
    def parse(cls, text: str) -> "Drafts":
        """Such as 1,0 or 2,1@1.7."""
        sizes, _, tokens = text.partition("@")
        num, verified = map(int, sizes.split(","))
        return cls(num, verified, float(tokens or 1))

    def __str__(self) -> str:
        return f"{self.num},{self.verified}" + (f"@{self.tokens:g}" if self.verified else "")


class Point(NamedTuple):
    """What is run. drift: of what every head wants from step to step, as in the command's help; cap: C."""

    requests: int
    context: int
    drift: str
    cap: int
    drafts: Drafts
    fixed: bool

    @property
    def policy(self) -> SparsePolicy:
        """Of all lanes."""
        return SparsePolicy(
            looks_ahead=self.drafts.num > 0,
            num_verified=self.drafts.verified,
            cap=0 if self.drift == NONE else self.cap if self.is_fixed else 4096,
            retry_above=None,
        )

    @property
    def is_fixed(self) -> bool:
        """Whether a head may take no more than its cap in any step."""
        return self.fixed or self.drift != MEASURED


class Lengths(NamedTuple):
    """Of a run in steps: windows of so many steps each, after others that are not counted."""

    warm_up: int
    windows: int
    steps: int

    @property
    def all(self) -> int:
        return self.warm_up + self.windows * self.steps


class Window(NamedTuple):
    """Of `steps` steps of all lanes. pieces: blocks of one KV head of one layer that were fetched; full_caps: in how
    many steps of a lane these were as many as its caps allow; lane_steps: of all lanes."""

    seconds: float
    steps: int
    tokens: int
    pieces: int
    full_caps: int
    lane_steps: int
    hits: int
    misses: int
    launch_s: float


class Measured(NamedTuple):
    """Medians of windows, but for shares, which are of all of them together. launch_share: of the time in which the
    host launched; late: blocks whose copy to the host had not ended when they left the ring, so that a scheduler would
    have let the lane wait."""

    step_ms: float
    tokens_s: float
    tokens_step: float
    link_bytes_s: float
    pieces_step: float
    full_caps: float
    hit_rate: float
    launch_share: float
    late: int

    @classmethod
    def of(cls, windows: Sequence[Window], piece_bytes: int, late: int) -> "Measured":
        def total(name: str) -> float:
            return float(sum(getattr(window, name) for window in windows))

        return cls(
            step_ms=statistics.median(1000 * window.seconds / window.steps for window in windows),
            tokens_s=statistics.median(window.tokens / window.seconds for window in windows),
            tokens_step=total("tokens") / total("lane_steps"),
            link_bytes_s=statistics.median(window.pieces * piece_bytes / window.seconds for window in windows),
            pieces_step=total("pieces") / total("steps"),
            full_caps=total("full_caps") / total("lane_steps"),
            hit_rate=total("hits") / max(total("hits") + total("misses"), 1),
            launch_share=total("launch_s") / total("seconds"),
            late=late,
        )


class Drive:
    """Of one point on a rig that has room for it."""

    def __init__(self, rig: Rig, point: Point, lengths: Lengths) -> None:
        self._rig, self._point, self._lengths = rig, point, lengths
        self._lanes = list(range(point.requests))
        self._samples = [Sample(lane=lane, logprobs=None, adjusted=False) for lane in self._lanes]
        cap = 0 if point.drift == NONE else point.cap
        base = cap * rig.sizes.model.num_kv_heads
        self._allowances = [Allowance(base, point.is_fixed) for _ in self._lanes]
        link = rig.base.link_bytes_s
        self._budget = LinkBudget(link / rig.sizes.piece_bytes if link else None)
        self._full = rig.sizes.full_caps(cap)
        # Lanes are at different places of their blocks, as they are in life, and end before their tables do.
        most = (lengths.all + MORE_STEPS) * (1 + point.drafts.verified) + BLOCK_SIZE
        self._num_tokens = [rig.sizes.context - most - lane * 7 % BLOCK_SIZE for lane in self._lanes]
        self._num_full = [(length - 1) // BLOCK_SIZE for length in self._num_tokens]
        self._copies: CopyEngine = _copies(rig)
        self._under_way: dict[int, tuple[int, int]] = {}
        self._num_copies = self._step = self.late = 0
        self.launch_s = 0.0

    def run(self) -> Measured:
        """All windows, from fabricated lanes on."""
        rig, point = self._rig, self._point
        rig.fabricate(self._num_tokens, point.policy, turns=point.drift == WORST)
        rig.sampler.chance.fill_(chance_for(point.drafts.tokens, point.drafts.verified) if point.drafts.verified else 0)
        self._window(self._lengths.warm_up, self._launch())
        windows = [self._window(self._lengths.steps, self._running) for _ in range(self._lengths.windows)]
        self._end()
        return Measured.of(windows, rig.sizes.piece_bytes, self.late)

    def steps(self, count: int) -> None:
        """So many steps of the lanes as they are, to be looked at while they run. After `run`, once."""
        assert count < MORE_STEPS
        self._window(count, self._launch())
        self._end()

    def _end(self) -> None:
        self._take(self._running.result())
        self._rig.runner.settle()

    def _window(self, count: int, running: RunningStep) -> Window:
        """So many results. running: the step that was launched last."""
        self._running = running
        tokens, full_caps, totals = 0, 0, Fetched(0, 0, 0, 0, 0)
        launch_s, begin = self.launch_s, time.perf_counter()
        now = begin
        for _ in range(count):
            last, self._running = self._running, self._launch()
            result = last.result()
            before, now = now, time.perf_counter()
            self._budget.note(now - before)
            tokens += self._take(result)
            full_caps += sum(fetched.misses - fetched.cut == self._full for fetched in result.fetched)
            totals = Fetched(*map(sum, zip(totals, *result.fetched, strict=True)))
        return Window(
            seconds=time.perf_counter() - begin,
            steps=count,
            tokens=tokens,
            pieces=totals.misses - totals.cut,
            full_caps=full_caps,
            lane_steps=count * len(self._lanes),
            hits=totals.hits,
            misses=totals.misses,
            launch_s=self.launch_s - launch_s,
        )

    def _launch(self) -> RunningStep:
        begin = time.perf_counter()
        self._step += 1
        shares = refills(self._allowances, self._budget.most(self._rig.sizes.model.num_layers))
        plan = StepPlan(
            step=self._step,
            decodes=self._lanes,
            num_drafts=self._point.drafts.num,
            num_proposals=self._point.drafts.num,
            samples=self._samples,
            keeps_queries=True,
            stored=self._stored(),
            refills=[(lane, *share) for lane, share in zip(self._lanes, shares, strict=True)],
        )
        with torch.inference_mode():
            self._rig.lanes.prepare(plan)
        running = self._rig.runner.run(plan)
        self.launch_s += time.perf_counter() - begin
        return running

    def _take(self, result: StepResult) -> int:
        """How many tokens it gave."""
        copies = []
        for lane, (own, fetched) in enumerate(zip(result.token_ids, result.fetched, strict=True)):
            self._allowances[lane].note(fetched.cut + fetched.surprises)
            self._num_tokens[lane] += len(own)
            while self._num_full[lane] < (self._num_tokens[lane] - 1) // BLOCK_SIZE:
                copies.append(self._copy(lane, self._num_full[lane]))
                self._num_full[lane] += 1
        if copies:
            self._copies.submit(copies)
        return sum(map(len, result.token_ids))

    def _copy(self, lane: int, block: int) -> Copy:
        self._num_copies += 1
        self._under_way[self._num_copies] = (lane, block)
        page = self._rig.page_table[lane][self._rig.sizes.num_slots + block % RING]
        host = (lane * 7919 + block) % len(self._rig.base.host.kv)
        return Copy(self._num_copies, "store", page, host)

    def _stored(self) -> list[tuple[int, int, int]]:
        stored = []
        for completion in self._copies.poll():
            lane, block = self._under_way.pop(completion.copy_id)
            if block + 1 < (self._num_tokens[lane] - 1) // BLOCK_SIZE:
                self.late += 1
            else:
                stored.append((lane, block, lane * self._rig.lanes.page_table.shape[1] + block))
        return stored


def _copies(rig: Rig) -> CopyEngine:
    host, device = rig.base.host, rig.base.device
    if device.type == "cpu":
        return SyncCopies(host.move)
    return StreamCopies(host.move_all, CudaStream(device))
