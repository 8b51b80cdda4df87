"""The prefill reserve: pages that running requests never take.

Owns: who is in it. Does not know: when anybody is let in or has to give way; the scheduler does. Imports no torch.

A waiting request that the other pages have no room for may prefill in the reserve, one at a time, so that a full
machine still answers the next prompt. When its prompt is done, room is made for it among the others; or it becomes
sparse in the next steps, if there is room for it then; or it waits with its KV in host blocks. It does not come back
here: that would load its KV again for every step.
"""

from collections.abc import Sequence

from minserve.engine.request import Request
from minserve.memory.blocks import BlockManager


class PrefillReserve:
    """num_pages: its size; 0: there is none. user: who is in it."""

    def __init__(self, blocks: BlockManager, num_pages: int) -> None:
        self._blocks = blocks
        self._num_pages = num_pages
        self.user: Request | None = None

    def is_open_to(self, request: Request) -> bool:
        """Whether there is a reserve with nobody in it, and the request has yet to yield its first token."""
        return self._num_pages > 0 and self.user is None and request.num_output_tokens == 0

    def keep_from(self, request: Request) -> int:
        """Pages that this request has to leave available: what is left of the reserve, if it is not its own."""
        if self.user is None:
            return self._num_pages
        if self.user is request:
            return 0
        return max(0, self._num_pages - len(self._blocks.pages(self.user.id)))

    def can_be_left(self, num_returned: int = 0) -> bool:
        """Whether the whole reserve is available, now or soon, if its user counts as one of the others and gives back
        so many pages."""
        return self._blocks.num_available + self._blocks.num_returning + num_returned >= self._num_pages

    def victim(self, running: Sequence[Request]) -> Request:
        """Who gives way when one of the others needs a page: the youngest.

        But not the user, unless it has taken more than the reserve: the others could not have its pages.
        """
        youngest = running[-1]
        if youngest is self.user and len(running) > 1 and len(self._blocks.pages(youngest.id)) <= self._num_pages:
            return running[-2]
        return youngest
