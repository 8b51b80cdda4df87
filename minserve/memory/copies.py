"""Copies between pages and host blocks: the interface, and when they happen.

Owns: the timing of copies. Does not know whose blocks they are; `BlockManager` keeps both ends of every copy from being
reused until its completion has been polled.

A copy is submitted when what it reads is complete and what it writes has no reader, so it may run at any time after
that, also beside a launched step, and in any order with others. Imports no torch: the tensors are moved by a `Mover`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Copy:
    """One block between page `page` and host block `host`. store: page to host; load: host to page."""

    id: int
    kind: Literal["store", "load"]
    page: int
    host: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A copy has ended. Not ok: what it should have written is undefined."""

    copy_id: int
    ok: bool = True


Mover = Callable[[Copy], None]
"""Moves the data of one copy."""


class CopyEngine(Protocol):
    """Runs copies, in the background where it can."""

    def submit(self, copies: Sequence[Copy]) -> None:
        """Start copies. Each is reported by `poll` once it has ended, in any order."""

    def poll(self) -> list[Completion]:
        """The copies that have ended since the last call. Never waits."""


class Event(Protocol):
    """Something that happens on a device."""

    def query(self) -> bool:
        """Whether it has happened. Never waits."""


class Stream(Protocol):
    """Work of a device, in its order."""

    def entered(self) -> AbstractContextManager[Any]:
        """Within it, work that is launched goes here."""

    def record_event(self) -> Event:
        """Happens when all that was launched so far has ended."""


class SyncCopies:
    """Copies at once, before `submit` returns.

    On a CPU nothing else could be meant: pages and host blocks are the same memory.
    """

    def __init__(self, move: Mover) -> None:
        self._move = move
        self._ended: list[Completion] = []

    def submit(self, copies: Sequence[Copy]) -> None:
        """Run them now."""
        for copy in copies:
            self._move(copy)
            self._ended.append(Completion(copy.id))

    def poll(self) -> list[Completion]:
        """All that were submitted since the last call."""
        ended, self._ended = self._ended, []
        return ended


class StreamCopies:
    """Copies in the background, on a stream of their own.

    They wait for no launched step, and none waits for them: what a copy reads was complete when it was submitted, and
    what it writes is read by nobody before its end has been polled. move: launches copies of one kind.
    """

    def __init__(self, move: Callable[[Sequence[Copy]], None], stream: Stream) -> None:
        self._move = move
        self._stream = stream
        self._waiting: list[Copy] = []
        self._under_way: deque[tuple[Sequence[Copy], Event]] = deque()

    def submit(self, copies: Sequence[Copy]) -> None:
        """They are launched by the next poll, together with others of their kind: a launch takes as long as a copy."""
        self._waiting += copies

    def poll(self) -> list[Completion]:
        """Those that have ended, in their order."""
        for kind in ("load", "store"):  # requests wait for loads
            own = [copy for copy in self._waiting if copy.kind == kind]
            if own:
                with self._stream.entered():
                    self._move(own)
                    self._under_way.append((own, self._stream.record_event()))
        self._waiting = []
        ended: list[Completion] = []
        while self._under_way and self._under_way[0][1].query():
            ended += [Completion(copy.id) for copy in self._under_way.popleft()[0]]
        return ended


class DelayedCopies:
    """Copies late, as a busy link does: a copy moves its data and is reported after a number of polls.

    fate: for each copy, how many polls later it ends, and whether it succeeds.
    """

    def __init__(self, move: Mover, fate: Callable[[Copy], tuple[int, bool]]) -> None:
        self._move = move
        self._fate = fate
        self._pending: list[tuple[int, bool, Copy]] = []
        self._num_polls = 0

    def submit(self, copies: Sequence[Copy]) -> None:
        """Queue them."""
        for copy in copies:
            delay, ok = self._fate(copy)
            self._pending.append((self._num_polls + delay, ok, copy))

    def poll(self) -> list[Completion]:
        """Those that are due, run now."""
        self._num_polls += 1
        due = [entry for entry in self._pending if entry[0] <= self._num_polls]
        self._pending = [entry for entry in self._pending if entry[0] > self._num_polls]
        for _, ok, copy in due:
            if ok:
                self._move(copy)
        return [Completion(copy.id, ok) for _, ok, copy in due]
