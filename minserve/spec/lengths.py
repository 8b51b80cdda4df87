"""How many drafts are worth proposing.

Owns: that choice. Does not know: who proposes or verifies them. Imports no torch.
"""

from collections.abc import Sequence
from typing import Protocol

CHOICES = (0, 1, 3)
MEMORY = 100
"""A running mean is of about so many values."""

LOOK_AGAIN = 50
LOOKS = (3, 3, 1, 1, 0, 0)
"""Of so many steps the first try these lengths, since texts and batches change: what did not pay may pay now.

Twice each: only a step that verifies as many drafts as it proposes says what such steps take.
"""

MAX_TRIES = 8
DRAFT_COST = 0.2

OUTLIER = 2.0
"""A step that takes so many times as long as others of its kind was held up by something else."""


class DraftLengths(Protocol):
    """Chooses for each step how many drafts its lanes propose; the next step verifies them.

    lengths: tokens of each request of a step.
    """

    @property
    def most(self) -> int:
        """The most that `choose` ever says."""

    @property
    def usual(self) -> Sequence[int]:
        """What it says often."""

    def choose(self, lengths: Sequence[int]) -> int:
        """How many drafts the next step proposes."""

    def note(self, num_drafts: int, lengths: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        """A step verified num_drafts drafts of each of these requests and accepted so many. seconds: what such a step
        takes, if this one tells."""


class FixedLength:
    """Always the same number; 0: no speculation."""

    def __init__(self, num_drafts: int) -> None:
        self.most = num_drafts
        self.usual = (num_drafts,)

    def choose(self, lengths: Sequence[int]) -> int:
        return self.most

    def note(self, num_drafts: int, lengths: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        pass


class AdaptiveLength:
    """The number that gave the most tokens a second lately, for such a batch and texts of such lengths.

    Expected tokens come from how often the k-th draft was right when those before it were, by the length of the text
    (in powers of two: heads are trained on short ones); seconds from steps of the same number of requests (likewise).
    A number that has not been tried yet is tried first; from time to time, the others again. Where steps do not tell
    what they take, since prompts are computed in them, each draft counts as DRAFT_COST of a step.
    """

    most = max(CHOICES)
    usual = CHOICES

    def __init__(self) -> None:
        self._right: dict[tuple[int, int], _Mean] = {}
        self._seconds: dict[tuple[int, int], _Mean] = {}
        self._num_steps = 0
        self._num_tries: dict[tuple[int, int], int] = {}

    def choose(self, lengths: Sequence[int]) -> int:
        """The best of CHOICES, or one that is to be looked at."""
        if not lengths:
            return 0
        self._num_steps += 1
        size = len(lengths).bit_length()
        for number in reversed(CHOICES):
            if (size, number) not in self._seconds and self._num_tries.get((size, number), 0) < MAX_TRIES:
                self._num_tries[size, number] = self._num_tries.get((size, number), 0) + 1
                return number
        if self._num_steps % LOOK_AGAIN < len(LOOKS):
            return LOOKS[self._num_steps % LOOK_AGAIN]
        known = {number: self._seconds[size, number].value for number in CHOICES if (size, number) in self._seconds}
        cost = known if len(known) == len(CHOICES) else {number: 1.0 + DRAFT_COST * number for number in CHOICES}
        return max(CHOICES, key=lambda number: self._tokens(lengths, number) / cost[number])

    def note(self, num_drafts: int, lengths: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        """See `DraftLengths`."""
        for length, count in zip(lengths, accepted, strict=True):
            for number in range(min(count + 1, num_drafts)):
                self._right.setdefault((_kind(length), number), _Mean(0.5)).add(float(number < count))
        if seconds is not None:
            key = (len(lengths).bit_length(), num_drafts)
            known = self._seconds.setdefault(key, _Mean(seconds))
            known.add(min(seconds, OUTLIER * known.value))
            if known.value > seconds * OUTLIER:  # the first ones were held up
                self._seconds[key] = _Mean(seconds)

    def _tokens(self, lengths: Sequence[int], num_drafts: int) -> float:
        """How many tokens a step is expected to give."""
        total = 0.0
        for length in lengths:
            likely = 1.0
            total += likely
            for number in range(num_drafts):
                known = self._right.get((_kind(length), number))
                likely *= 0.5 if known is None else known.value
                total += likely
        return total


def _kind(length: int) -> int:
    return (length // 512).bit_length()


class _Mean:
    """A running mean, which begins with one value that nobody saw."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._count = 1

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, MEMORY)
        self.value += (value - self.value) / self._count
