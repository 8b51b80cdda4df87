"""The engine: requests in, steps, tokens out. It runs in its own process or inside a script.

Owns: the scheduler, the lanes' tables and the runner, and how many steps are in flight.
Does not know: sockets, text, HTTP.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from minserve.engine.looks import Looks
from minserve.engine.plan import StepResult
from minserve.engine.scheduler import Scheduler
from minserve.grammar import Grammars
from minserve.memory.blocks import blocks_for
from minserve.memory.lanes import Lanes
from minserve.memory.working_sets import WorkingSets
from minserve.protocol import Delta, Outputs, Ready, Submit, WorkingSet
from minserve.runner.runner import Runner, RunningStep


class _InFlight(NamedTuple):
    """A launched step. tells: how long it takes says how long others like it take."""

    running: RunningStep
    launched_at: float
    tells: bool


class Engine:
    """Serves until it is dropped. Not thread-safe: one caller submits, aborts and steps.

    run_ahead: 1 launches a step before the tokens of the last one are known, so that the device never waits for the
    host; 0 looks first. release: gives back what the process's end alone would take long to give back.
    is_waiting: the last step did nothing, since all that there is to do waits for copies.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lanes: Lanes,
        runner: Runner,
        grammars: Grammars,
        *,
        run_ahead: int,
        info: Ready,
        sets: WorkingSets | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.info = info
        self._looks = Looks(sets)
        self._release = release
        self._grammars = grammars
        self._scheduler = scheduler
        self._lanes = lanes
        self._runner = runner
        self._run_ahead = run_ahead
        self._in_flight: deque[_InFlight] = deque()
        self.is_waiting = False
        self._last_result_at = 0.0

    def prepare(self, submit: Submit) -> None:
        """Do ahead what `submit` would take long for. The one thing that another thread may call."""
        if submit.grammar is not None:
            self._grammars.compile(submit.grammar)

    def submit(self, submit: Submit) -> None:
        """Queue a request. Raises RequestError, with nothing changed, if it can never be served."""
        self._scheduler.add(submit)

    def abort(self, request_id: str) -> None:
        """End a request; its last delta comes with the next step. An unknown id is none of our business."""
        self._scheduler.abort(request_id)

    def abort_all(self) -> None:
        """End every request."""
        for request_id in self._scheduler.request_ids:
            self._scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

    def step(self) -> Outputs:
        """Advance every request that can. Call it while `has_work`."""
        plan = self._scheduler.schedule()
        if not plan.is_empty:
            self._lanes.prepare(plan)
            tells = not (plan.chunks or plan.demotions) and plan.num_drafts == plan.num_proposals
            launched_at = time.perf_counter()  # a CPU computes the step while it is launched
            self._in_flight.append(_InFlight(self._runner.run(plan), launched_at, tells))
        deltas = self._commit(keep=0 if plan.is_empty else self._run_ahead)
        self.is_waiting = plan.is_empty and not self._in_flight and not deltas
        return Outputs(deltas=deltas, stats=self._scheduler.stats())

    def _commit(self, keep: int) -> list[Delta]:
        """Take in the results of all launched steps but the `keep` newest."""
        deltas = self._scheduler.take_ended()
        while len(self._in_flight) > keep:
            result = self._result_of(self._in_flight.popleft())
            if not self._in_flight:
                self._runner.settle()  # as no later step's foreground says that this one's background has ended
            deltas += self._scheduler.commit(result)
        return deltas

    def _result_of(self, step: _InFlight) -> StepResult:
        result = step.running.result()
        now = time.perf_counter()
        if step.tells:
            result.seconds = now - max(step.launched_at, self._last_result_at)
        self._last_result_at = now
        return result

    def working_set(self, request_id: str) -> WorkingSet | None:
        """Which blocks of a request are in pages; None if all are, since it is not sparse."""
        for request in self._scheduler.running:
            if request.id == request_id and request.policy is not None:
                return self._looks.look(request_id, request.lane, blocks_for(len(request.token_ids)))
        return None

    def report(self) -> str:
        """What working sets have done so far, as a table by layer."""
        return self._looks.table()

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix, so that the next request starts cold."""
        self._scheduler.clear_prefix_cache()

    def close(self) -> None:
        """Give back what the system would take minutes to take back. The engine serves nobody after that."""
        self._release()

    def check(self) -> None:
        """Assert every invariant of the scheduler and the memory."""
        self._scheduler.check()
