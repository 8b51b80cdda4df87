"""Who waits, who runs, and in which lane.

Owns: both queues, always in the order of arrival, and the free lanes. Does not know: why anybody comes or goes, or
pages. Imports no torch.
"""

from bisect import insort

from minserve.engine.request import Request, Status
from minserve.memory.pool import PlacePool, background, foreground


class Roster:
    """waiting and running are for all to read; `by_id` holds both."""

    def __init__(self, num_lanes: int) -> None:
        self.by_id: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._lanes = PlacePool(num_lanes)

    @property
    def has_lane(self) -> bool:
        return self._lanes.num_available > 0

    def add(self, request: Request) -> None:
        """A new request waits."""
        self.by_id[request.id] = request
        self.waiting.append(request)

    def start(self, request: Request) -> None:
        """It gets a lane, which knows nothing of it yet."""
        lanes = self._lanes.allocate(1)
        assert lanes is not None
        self.waiting.remove(request)
        request.status, request.lane, request.is_set_up = Status.RUNNING, lanes[0], False
        insort(self.running, request, key=_arrival)

    def leave_lane(self, request: Request, last_step: int) -> None:
        """Its lane is free when step last_step has ended, with its background pass."""
        self.running.remove(request)
        self._lanes.release(
            [request.lane], background(last_step) if request.policy is not None else foreground(last_step)
        )
        request.lane = -1

    def requeue(self, request: Request) -> None:
        """It waits again, in its old place."""
        request.status, request.num_computed, request.drafts = Status.WAITING, 0, ()
        insort(self.waiting, request, key=_arrival)

    def end(self, request: Request) -> None:
        """It has ended, wherever it was; it has left its lane."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self.by_id[request.id]

    def end_step(self, step: int) -> None:
        """The result of step `step` is there."""
        self._lanes.end_step(foreground(step))

    def end_background(self, step: int) -> None:
        """The background pass of step `step` has ended."""
        self._lanes.end_step(background(step))

    def check(self) -> None:
        """Assert every invariant."""
        self._lanes.check(request.lane for request in self.running)
        for queue in (self.waiting, self.running):
            arrivals = [request.arrival for request in queue]
            assert arrivals == sorted(set(arrivals)), "a queue is out of order"
        for request in self.running:
            assert 0 <= request.num_computed <= request.num_tokens
        alive = {request.id for request in [*self.waiting, *self.running]}
        assert alive == self.by_id.keys(), "a request is in no queue, or in one after its end"


def _arrival(request: Request) -> int:
    return request.arrival
