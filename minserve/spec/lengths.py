"""How many drafts are worth proposing.

Owns: that choice. Does not know: who proposes or verifies them. Imports no torch.
"""

from collections.abc import Sequence
from typing import Protocol


class DraftLengths(Protocol):
    """Chooses for each step how many drafts its decodes propose; the next step verifies them."""

    @property
    def most(self) -> int:
        """The most that `choose` ever says."""

    def choose(self, num_decodes: int) -> int:
        """For a step of so many decodes."""

    def note(self, num_drafts: int, accepted: Sequence[int]) -> None:
        """A step verified num_drafts drafts for each of its decodes, and so many of each were accepted."""


class FixedLength:
    """Always the same number; 0: no speculation."""

    def __init__(self, num_drafts: int) -> None:
        self.most = num_drafts

    def choose(self, num_decodes: int) -> int:
        return self.most

    def note(self, num_drafts: int, accepted: Sequence[int]) -> None:
        pass
