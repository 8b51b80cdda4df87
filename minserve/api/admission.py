"""Who is let in: room in the queue, for all clients together and for each key.

Owns: the number of choices in flight, and whether new work is taken.
Does not know: HTTP, what the requests ask for, the engine's own queue.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from minserve.api.auth import Caller
from minserve.api.engine import Engine
from minserve.config import ServerConfig
from minserve.errors import OverloadedError, RateLimitError, RequestError

DRAIN_RETRY_AFTER_S = 30
FULL_RETRY_AFTER_S = 2


class Admission:
    """The door. A choice, one text that a request asks for, holds its place until its answer has been made.

    Counted here and not from the engine's gauges, which are a step old: a burst must not pass them.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._draining = asyncio.Event()
        self._engine = engine
        self._most = engine.info.max_num_seqs + config.max_num_waiting
        self._most_per_key = config.max_requests_per_key
        self._num_choices = 0
        self._num_of_tenant: Counter[str] = Counter()
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

    @property
    def open(self) -> bool:
        """Whether the server takes new work."""
        return self._engine.alive and not self.draining

    def check(self, caller: Caller, num_choices: int = 1) -> None:
        """Raise OverloadedError if there is no room now. The door asks before a body is read: refusing is cheap."""
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
            raise OverloadedError(
                f"the server is full: {self._most} requests may run or wait",
                retry_after_s=FULL_RETRY_AFTER_S,
                code="queue_full",
            )

    @contextmanager
    def admit(self, caller: Caller, num_choices: int = 1, param: str = "n") -> Iterator[None]:
        """Hold room for num_choices. Raises OverloadedError, or RequestError (of param) if there will never be room."""
        most = self._most if self._most_per_key is None else min(self._most, self._most_per_key)
        if num_choices > most:
            raise RequestError(f"{param} asks for {num_choices} texts; at most {most} may run or wait", param=param)
        self.check(caller, num_choices)
        self._num_choices += num_choices
        self._num_of_tenant[caller.tenant] += num_choices
        self._idle.clear()
        try:
            yield
        finally:
            self._num_choices -= num_choices
            self._num_of_tenant[caller.tenant] -= num_choices
            if self._num_choices == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no choice is in flight."""
        await self._idle.wait()
