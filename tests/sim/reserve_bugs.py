"""Planted bugs of the prefill reserve: who takes of it, who stays in it, and who gives way."""

from minserve.engine.reserve import PrefillReserve
from minserve.engine.scheduler import Scheduler
from tests.sim.bugs import bug


@bug("running requests take the prefill reserve")
def reserve_taken():
    return PrefillReserve, "keep_from", lambda self, request: 0


@bug("two requests prefill in the reserve")
def reserve_shared():
    return PrefillReserve, "is_open_to", lambda self, request: self._num_pages > 0


@bug("whoever was in the reserve keeps it when it ends")
def reserve_kept():
    original = Scheduler._leave_lane

    def leave_lane(self, request):
        user = self._reserve.user
        original(self, request)
        self._reserve.user = user

    return Scheduler, "_leave_lane", leave_lane


@bug("a request goes back to the reserve with its prompt done")
def reserve_again():
    return PrefillReserve, "is_open_to", lambda self, request: self._num_pages > 0 and self.user is None


@bug("a request stays in the reserve when its prompt is done")
def reserve_never_left():
    return Scheduler, "_leave_reserve", lambda self, decisions: None


@bug("not the youngest gives way")
def wrong_victim():
    return PrefillReserve, "victim", lambda self, running: running[len(running) // 2]
