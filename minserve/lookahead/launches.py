"""Which halves of steps have been launched, for flags in a GPU's memory that tell them of each other.

Owns: the numbers of halves, on the host and on the device, and flags. Does not know: what halves do.

Each half that is launched has a number, which it records in its flags. It waits for the number of the other half that
was launched last before it. Only the host knows that, and what is recorded in a graph has fixed arguments: so whenever
a half is launched, as it stands or from a graph, the host writes both numbers into the device's memory, in the order of
the half's own stream. No two have the same number, so one that is launched for nobody, to compile it or to record it,
is taken for no other.

A half is waited for when all of it has been launched. CUDA knows nothing of that, but its queues begin nothing before
what was launched earlier into the same queue, and two warps that wait leave room for any kernel; so nothing waits in
vain, whatever streams share a queue.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from minserve.kernels.flags import record_flag, wait_for_flag


class Flag:
    """A signal (order.py). own, awaited: [1] int64, what is recorded, and what is waited for."""

    def __init__(self, own: torch.Tensor, awaited: torch.Tensor) -> None:
        self._flag, self._own, self._awaited = torch.zeros_like(own), own, awaited

    def record(self) -> None:
        record_flag(self._flag, self._own)

    def wait(self) -> None:
        wait_for_flag(self._flag, self._awaited)


class Launches:
    """Of both halves. To be synchronized with before streams other than the current one see the first flag."""

    def __init__(self, device: torch.device) -> None:
        self._num_foregrounds = self._num_backgrounds = 0
        # On the device, which halves run, and which of the other they wait for: the latter two by those who wait.
        self._foreground, self._background, self._last_foreground, self._last_background = (
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)
        )

    def flag_of_foreground(self) -> Flag:
        """Which the background waits for."""
        return Flag(self._foreground, self._last_foreground)

    def flag_of_background(self) -> Flag:
        """Which the foreground waits for."""
        return Flag(self._background, self._last_background)

    def foreground(self) -> None:
        """Another one is launched now, on the current stream. If it is being recorded, nothing is launched."""
        if not torch.cuda.is_current_stream_capturing():
            self._num_foregrounds += 1
            self._foreground.fill_(self._num_foregrounds)

    @contextmanager
    def background(self, stream: AbstractContextManager[Any]) -> Iterator[None]:
        """Another one is launched within it, on that stream, once."""
        self._num_backgrounds += 1
        with stream:
            self._background.fill_(self._num_backgrounds)
            self._last_foreground.fill_(self._num_foregrounds)
            yield
        self._last_background.fill_(self._num_backgrounds)
