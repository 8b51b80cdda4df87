"""What waits for what between the two halves of a step: the foreground, which computes tokens, and the background,
which fetches for the next step.

Owns: the signals, and the streams of the background. Does not know: what is done on them.

The foreground of step t and the background of step t run side by side, and so do the background of t and the
foreground of t + 1. Both are launched in the order F(t), B(t), F(t + 1), ..., the sampling of t behind B(t), and the
signals are the same for all steps, whether these are replayed from graphs or launched as they stand. On a CPU
everything is done in the order of the calls, and no signal means anything.

On a GPU signals are flags in its memory (launches.py). CUDA's events lie in the host's, so that they are late while
fetches fill the link (tools/NOTES.md, "On a GPU"). What waits for a flag is one warp, on an SM.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minserve.lookahead.launches import Launches

HIGHEST_PRIORITY = -5
"""Of CUDA's streams on a Hopper GPU; others take it for the highest that they have."""


class Signal(Protocol):
    """Something that happens in every step anew."""

    def record(self) -> None:
        """It happens when all that the current stream has so far is done."""

    def wait(self) -> None:
        """What comes on the current stream waits until it has happened the last time."""


class Streams(Protocol):
    """Where the background's work goes. Everything is said inside `background`."""

    def background(self) -> AbstractContextManager[Any]:
        """Within it, the background's own stream is the current one."""

    def fetching(self, number: int) -> AbstractContextManager[Any]:
        """Within it, the stream that fetches is, behind all that the background's own stream has so far: one group's
        blocks come after the other's, as the link has no room for both."""

    def wait_for(self, number: int) -> None:
        """The current stream waits for what came within `fetching` of that number."""

    def finishing(self) -> AbstractContextManager[Any]:
        """The same of the stream that ends layers."""

    def join(self) -> None:
        """The background's own stream waits for all of them."""

    def synchronize(self) -> None:
        """The host waits for all that the background's own stream has so far."""


@dataclass(frozen=True, slots=True)
class Order:
    """begun: the foreground has written what the background begins with; taken: the background has copied that.
    attended, fetched: of each group of layers that the background takes at once: its queries are there, and its slots
    are read no more; and its pages are as the next step's rows read them.
    ranked: it is known whose step runs again, and what is counted of it; ended: all of it.

    launches: of halves, on a GPU. on_host: what is computed is known to the host at once.
    """

    begun: Signal
    taken: Signal
    attended: Sequence[Signal]
    fetched: Sequence[Signal]
    ranked: Signal
    ended: Signal
    streams: Streams
    on_host: bool
    launches: Launches | None = None

    @classmethod
    def of(cls, device: torch.device, num_groups: int) -> "Order":
        """That of a device, with signals of its own for so many groups."""
        on_host = device.type == "cpu"
        launches = None if on_host else Launches(device)
        new: Callable[[], Signal] = _InOrder
        new_ahead: Callable[[], Signal] = _InOrder
        if launches is not None:
            new, new_ahead = launches.flag_of_background, launches.flag_of_foreground
        order = cls(
            begun=new_ahead(),
            taken=new(),
            attended=[new_ahead() for _ in range(num_groups)],
            fetched=[new() for _ in range(num_groups)],
            ranked=new(),
            ended=new(),
            streams=_OneAfterTheOther() if on_host else _CudaStreams(device),
            on_host=on_host,
            launches=launches,
        )
        if launches is not None:
            torch.cuda.synchronize(device)
        return order

    def foreground(self) -> None:
        """A foreground is launched now, or recorded. To be said of each that is launched, also when it is replayed."""
        if self.launches is not None:
            self.launches.foreground()

    def background(self) -> AbstractContextManager[Any]:
        """Within it, a background is launched, on its stream; once, and it may be recorded too."""
        stream = self.streams.background()
        return stream if self.launches is None else self.launches.background(stream)


class _InOrder:
    """Of a CPU."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _OneAfterTheOther:
    """Of a CPU."""

    def background(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def fetching(self, number: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait_for(self, number: int) -> None:
        pass

    def finishing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _CudaStreams:
    """Of the highest priority: their kernels are small and late, and the next step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._background, self._fetcher, self._finisher = (
            torch.cuda.Stream(device, priority=HIGHEST_PRIORITY)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._ends: dict[int, torch.cuda.Event] = {}
        self._forks: list[torch.cuda.Stream] = []

    def background(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._background)

    @contextmanager
    def fetching(self, number: int) -> Iterator[None]:
        with self._forked(self._fetcher):
            yield
            self._ends[number] = torch.cuda.current_stream().record_event()

    def wait_for(self, number: int) -> None:
        torch.cuda.current_stream().wait_event(self._ends[number])

    def finishing(self) -> AbstractContextManager[Any]:
        return self._forked(self._finisher)

    def _forked(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        stream.wait_stream(torch.cuda.current_stream())
        self._forks.append(stream)
        return torch.cuda.stream(stream)

    def join(self) -> None:
        current = torch.cuda.current_stream()
        # Not all there are: a graph may wait for nothing but what it has begun itself.
        for stream in dict.fromkeys(self._forks):
            current.wait_stream(stream)
        self._forks = []

    def synchronize(self) -> None:
        self._background.synchronize()
