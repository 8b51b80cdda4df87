"""What the API needs of an engine: the client of the engine process, or a scripted one in tests.

Does not know: processes, sockets, models.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from minserve.protocol import Delta, Ready, Stats, Submit, WorkingSet


class Engine(Protocol):
    """Takes requests and streams their tokens."""

    @property
    def info(self) -> Ready:
        """What is served."""

    @property
    def stats(self) -> Stats:
        """The gauges and counters of the last step."""

    @property
    def alive(self) -> bool:
        """False once the engine is gone; it never comes back."""

    def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """The request's deltas. Closing the generator early aborts it. Raises EngineDeadError if the engine dies."""

    async def working_set(self, request_id: str) -> WorkingSet | None:
        """What the GPU holds of a request just now; None if that is all of it: if it is dense, or has ended."""

    def report(self) -> None:
        """Have it write what working sets have done, by layer, to the log."""

    async def wait_dead(self) -> str:
        """Returns, with the reason, when the engine has died by itself."""

    async def stop(self, timeout_s: float) -> None:
        """End what still runs (each request gets its last delta), then end the engine, by force after the timeout."""
