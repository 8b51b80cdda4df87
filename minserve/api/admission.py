"""Who is let in: room in the queue, for all clients together and for each key.

Owns: the number of choices in flight, and whether new work is taken.
Does not know: HTTP, but for the name of a request's place; what requests ask for; the engine's own queue.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

from minserve.api.auth import Caller
from minserve.api.engine import Engine
from minserve.config import ServerConfig
from minserve.errors import OverloadedError, RateLimitError, RequestError

DRAIN_RETRY_AFTER_S = 30
FULL_RETRY_AFTER_S = 2
REFUSING_S = 0.1
"""After a refusal the server counts as refusing for so long."""


class Admission:
    """The door. A choice, one text that a request asks for, has its place until the request has been answered.

    Counted here and not from the engine's gauges, which are a step old: a burst must not pass them.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._draining = asyncio.Event()
        self._engine = engine
        self._most = engine.info.max_num_seqs + config.max_num_waiting
        self._most_per_key = config.max_requests_per_key
        self._num_choices = 0
        self._num_of_tenant: Counter[str] = Counter()
        self._refused_at = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether the server is stopping."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no new work from now on."""
        self._draining.set()

    async def wait_draining(self, timeout_s: float) -> None:
        """Returns when the server is stopping, and after the timeout."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._draining.wait(), timeout_s)

    def is_refusing(self) -> bool:
        """Whether somebody has been refused a moment ago because there was no room."""
        return time.monotonic() < self._refused_at + REFUSING_S

    @property
    def open(self) -> bool:
        """Whether the server takes new work."""
        return self._engine.alive and not self.draining

    @contextmanager
    def enter(self, caller: Caller) -> Iterator["Place"]:
        """A request's place until it has been answered. Raises OverloadedError if there is no room for one now: before
        its body is read, so that refusing is cheap."""
        self._check(caller, 1)
        place = Place(self, caller)
        try:
            yield place
        finally:
            place.leave()

    async def wait_idle(self) -> None:
        """Returns when no choice is in flight."""
        await self._idle.wait()

    def most_of(self, caller: Caller) -> int:
        """The texts that a request of this caller's could ever ask for."""
        return self._most if self._most_per_key is None else min(self._most, self._most_per_key)

    def change(self, caller: Caller, num_choices: int) -> None:
        """So many choices more are in flight, or fewer. Raises OverloadedError if there is no room for more."""
        if num_choices > 0:
            self._check(caller, num_choices)
        self._num_choices += num_choices
        self._num_of_tenant[caller.tenant] += num_choices
        if self._num_choices:
            self._idle.clear()
        else:
            self._idle.set()

    def _check(self, caller: Caller, num_choices: int) -> None:
        if not self._engine.alive:
            raise OverloadedError("the engine has died; the server is going down", code="engine_dead")
        if self.draining:
            raise OverloadedError(
                "the server is shutting down", retry_after_s=DRAIN_RETRY_AFTER_S, code="shutting_down"
            )
        if self._most_per_key is not None and self._num_of_tenant[caller.tenant] + num_choices > self._most_per_key:
            raise RateLimitError(
                f"this API key may have {self._most_per_key} requests running or waiting",
                retry_after_s=FULL_RETRY_AFTER_S,
                code="rate_limit_exceeded",
            )
        if self._num_choices + num_choices > self._most:
            self._refused_at = time.monotonic()
            raise OverloadedError(
                f"the server is full: {self._most} requests may run or wait",
                retry_after_s=FULL_RETRY_AFTER_S,
                code="queue_full",
            )


class Place:
    """What one request has of the room: nothing until its body has come, since that is its client's to delay; then a
    place, until it is known for how many texts it asks."""

    def __init__(self, admission: Admission, caller: Caller) -> None:
        self._admission = admission
        self._caller = caller
        self._num_choices = 0

    def take(self, num_choices: int = 1, param: str = "n") -> None:
        """Have room for so many texts. Raises OverloadedError, or RequestError (of param) if there will never be."""
        most = self._admission.most_of(self._caller)
        if num_choices > most:
            raise RequestError(f"{param} asks for {num_choices} texts; at most {most} may run or wait", param=param)
        self._admission.change(self._caller, num_choices - self._num_choices)
        self._num_choices = num_choices

    def leave(self) -> None:
        """The request has been answered."""
        self._admission.change(self._caller, -self._num_choices)
        self._num_choices = 0


PLACE = web.RequestKey("place", Place)
