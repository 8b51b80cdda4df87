"""How many blocks each sparse lane may fetch in a step: the link's bytes, shared out.

Owns: that arithmetic. Does not know: requests, devices, or what the link carries in a second. Imports no torch.

All of it counts blocks of one KV head, in each layer, over all heads of a lane. A lane that is settled misses little,
and one whose text has just turned to other things misses much at once. So what a lane may fetch on average is
fixed, but it may save some up, and lanes that lately had to do without blocks get more of what all of them
together may.
"""

from collections.abc import Sequence
from dataclasses import dataclass

BURST_STEPS = 8
"""A lane may have saved up what it gets in so many steps on average."""

SETTLED_SHARE = 0.5
"""The part of its average that a lane gets when only others do without blocks: it should not become one of them."""

MEMORY = 8
"""What a lane did without is remembered for about so many steps."""


@dataclass(slots=True)
class Allowance:
    """One lane's. base: what it gets on average in a step. fixed: neither more nor less, and nothing is saved.

    want: blocks that it lately did without, a running mean.
    """

    base: int
    fixed: bool
    want: float = 0.0

    def note(self, num_missed: int) -> None:
        """In some step, it did without so many blocks, over all layers."""
        self.want += (num_missed - self.want) / MEMORY


def refills(lanes: Sequence[Allowance]) -> list[tuple[int, int]]:
    """For each lane, (blocks that it may fetch more, the most that it may have saved up). In sum no more than their
    averages."""
    adaptive = [lane for lane in lanes if not lane.fixed]
    total, wanted = sum(lane.base for lane in adaptive), sum(lane.want for lane in adaptive)
    to_share = (1 - SETTLED_SHARE) * total if wanted > 0 else 0.0
    return [
        (lane.base, lane.base)
        if lane.fixed
        else (_refill(lane, to_share * lane.want / wanted if wanted > 0 else None), BURST_STEPS * lane.base)
        for lane in lanes
    ]


def _refill(lane: Allowance, share: float | None) -> int:
    """share: its part of what is shared by want; None: nobody wants anything, and nothing is."""
    if share is None:
        return lane.base
    return min(int(SETTLED_SHARE * lane.base + share), BURST_STEPS * lane.base)
