"""The prefill reserve: pages that running requests never take.

Owns: who is in it. Does not know: when anybody is let in or has to give way; the scheduler does. Imports no torch.

A waiting request that the other pages have no room for may prefill in the reserve, one at a time, so that a full
machine still answers the next prompt. When its prompt is done, room is made for it among the others, or it waits with
its KV in host blocks.
"""

from minserve.engine.request import Request
from minserve.memory.blocks import BlockManager


class PrefillReserve:
    """num_pages: its size; 0: there is none. user: who is in it."""

    def __init__(self, blocks: BlockManager, num_pages: int) -> None:
        self._blocks = blocks
        self._num_pages = num_pages
        self.user: Request | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is a reserve with nobody in it."""
        return self._num_pages > 0 and self.user is None

    def keep_from(self, request: Request) -> int:
        """Pages that this request has to leave available: what is left of the reserve, if it is not its own."""
        if self.user is None:
            return self._num_pages
        if self.user is request:
            return 0
        return max(0, self._num_pages - len(self._blocks.pages(self.user.id)))

    @property
    def can_be_left(self) -> bool:
        """Whether the whole reserve is available again if its user counts as one of the others."""
        return self._blocks.num_available >= self._num_pages
