"""How many blocks each sparse lane may fetch in a step: the link's bytes, shared out.

Owns: that arithmetic. Does not know: requests, devices, or what the link carries in a second. Imports no torch.

What all together may is their averages, or what the link carries while a step computes, if that is less: so a step
need not wait for what it fetches.

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
"""What a lane did without, and what steps took, is remembered for about so many steps."""

LINK_SHARE = 0.8
"""Of what the link carries while a step computes, what steps may ask of it: other copies cross it too, and beside a
step fetches reach nine tenths of what they do alone."""

LONGEST = 1.25
"""A step that takes more than so many times what steps lately took counts as if it took that."""


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


@dataclass(slots=True)
class LinkBudget:
    """Of a step: what the link carries in most of the time that such steps take.

    That time is what steps lately took, and in it they may have waited for the link. As the budget is less than what
    is carried in it, such steps become shorter, until they wait no more.

    blocks_s: blocks of one KV head of one layer that cross the link in a second; None: no step waits for it.
    """

    blocks_s: float | None
    seconds: float | None = None

    def note(self, seconds: float) -> None:
        """A step of sparse lanes took so long."""
        if self.seconds is None:
            self.seconds = seconds
        self.seconds += (min(seconds, LONGEST * self.seconds) - self.seconds) / MEMORY

    def most(self, num_layers: int) -> int | None:
        """Blocks that all lanes together may fetch in each layer of the next step; None: as many as they like."""
        if self.blocks_s is None or self.seconds is None:
            return None
        return int(LINK_SHARE * self.blocks_s * self.seconds / num_layers)


def refills(lanes: Sequence[Allowance], most: int | None = None) -> list[tuple[int, int]]:
    """For each lane, (blocks that it may fetch more, the most that it may have saved up). In sum no more than their
    averages, and no more than `most`, but for what fixed lanes get in any case, and a block for each other."""
    adaptive = [lane for lane in lanes if not lane.fixed]
    total, wanted = sum(lane.base for lane in adaptive), sum(lane.want for lane in adaptive)
    left = total if most is None else most - sum(lane.base for lane in lanes if lane.fixed)
    part = min(max(left, 0) / total, 1.0) if total else 1.0
    to_share = (1 - SETTLED_SHARE) * part * total if wanted > 0 else 0.0
    return [
        (lane.base, lane.base)
        if lane.fixed
        else (
            _refill(lane, part, to_share * lane.want / wanted if wanted > 0 else None),
            max(BURST_STEPS, int(BURST_STEPS * part * lane.base)),
        )
        for lane in lanes
    ]


def _refill(lane: Allowance, part: float, share: float | None) -> int:
    """part: of averages, what all together may; share: its own of what is shared by want; None: nobody wants anything,
    and nothing is."""
    average = part * lane.base
    if share is not None:
        average = min(SETTLED_SHARE * average + share, BURST_STEPS * average)
    return max(1, int(average))
