"""Streams of tokens with the times at which they arrived, and the figures that they come to.

Times are those of time.monotonic, which all processes of a machine share.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Stream(NamedTuple):
    """One request: when it was sent, when each event with text arrived, and how many tokens the events brought."""

    sent_s: float
    events_s: list[float]
    num_tokens: int


class Figures(NamedTuple):
    """What many streams at once come to.

    tokens_per_s: in the window from the last stream's first event to the first stream's last, in which all of them run.
    tokens_per_event: above 1 where the sender has put tokens together; the times between tokens are between events.
    """

    tokens_per_s: float
    window_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    gap_p50_ms: float
    gap_p95_ms: float
    gap_p99_ms: float
    tokens_per_event: float

    @classmethod
    def of(cls, streams: list[Stream]) -> "Figures":
        """Raises ValueError if there is no moment in which all streams run: then new tokens are too few."""
        begin = max(stream.events_s[0] for stream in streams)
        end = min(stream.events_s[-1] for stream in streams)
        if begin >= end:
            raise ValueError("one stream ends before the last one has begun: ask for more new tokens")
        ttft = [1000 * (stream.events_s[0] - stream.sent_s) for stream in streams]
        gaps = [
            1000 * (b - a) for stream in streams for a, b in zip(stream.events_s, stream.events_s[1:], strict=False)
        ]
        num_tokens = sum(stream.num_tokens for stream in streams)
        return cls(
            tokens_per_s=sum(tokens_between(stream, begin, end) for stream in streams) / (end - begin),
            window_s=end - begin,
            ttft_p50_ms=quantile(ttft, 0.5),
            ttft_p95_ms=quantile(ttft, 0.95),
            gap_p50_ms=quantile(gaps, 0.5),
            gap_p95_ms=quantile(gaps, 0.95),
            gap_p99_ms=quantile(gaps, 0.99),
            tokens_per_event=num_tokens / sum(len(stream.events_s) for stream in streams),
        )


def tokens_between(stream: Stream, begin: float, end: float) -> float:
    """Tokens that arrived after begin and not after end, if each event has brought as many as any other."""
    num_events = sum(begin < event <= end for event in stream.events_s)
    return num_events * stream.num_tokens / len(stream.events_s)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least such a share of them does not pass."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
