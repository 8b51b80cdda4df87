"""Which of a resident request's pages become its slots and its ring when it becomes sparse.

Owns: that choice. Does not know: who holds a page, beyond what it is told, or where new pages come from. Imports no torch.

As much as possible stays where it is. A page that somebody else holds too is copied from, and never written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minserve.config import BLOCK_SIZE
from minserve.memory.tables import RING, WorkingSetPages

FRESH = -1
"""In place of a page: a new one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """slots: (page, block that it holds or -1); ring: (page, page to be copied there first or -1). FRESH: a new page."""

    pages: Sequence[int]
    slots: Sequence[tuple[int, int]]
    ring: Sequence[tuple[int, int]]

    @property
    def num_fresh(self) -> int:
        return sum(page == FRESH for page, _ in (*self.slots, *self.ring))

    def filled(self, fresh: Iterator[int], host_blocks: Sequence[int]) -> WorkingSetPages:
        """With new pages where they are needed."""
        slots = [(next(fresh) if page == FRESH else page, block) for page, block in self.slots]
        ring = [(next(fresh) if page == FRESH else page, source) for page, source in self.ring]
        return WorkingSetPages(
            pages=tuple(self.pages),
            slot_pages=tuple(page for page, _ in slots),
            slot_blocks=tuple(block for _, block in slots),
            ring_pages=tuple(page for page, _ in ring),
            ring_copies=tuple((source, page) for page, source in ring if source != -1),
            host_blocks=tuple(host_blocks),
        )


def ring_start(num_tokens: int) -> int:
    """The first block in the ring of a step that finds so many tokens (kernels/sparse_rows.py)."""
    return max((num_tokens - 1) // BLOCK_SIZE - 1, 0)


def lay_out(pages: Sequence[int], is_own: Sequence[bool], num_tokens: int, num_slots: int) -> Layout:
    """For a request with pages by block, of which is_own says who are nobody else's; all but the last token have KV.

    Slots take pages of blocks before the ring; the others of these are spare, and may become pages of the ring that
    hold nothing yet, which are written only when the slots have been filled from them. A page that is copied into
    must not be one of these.
    """
    start, num_full = ring_start(num_tokens), (num_tokens - 1) // BLOCK_SIZE
    num_written = num_full + ((num_tokens - 1) % BLOCK_SIZE > 0)
    own = [block for block in range(min(start, len(pages))) if is_own[block]]
    spare = [pages[block] for block in own[num_slots:]]
    slots = [(pages[block], block) for block in own[:num_slots]]
    slots += [(FRESH, -1)] * (num_slots - len(slots))

    ring: list[tuple[int, int]] = [(FRESH, -1)] * RING
    for block in range(start, start + RING):
        if block < len(pages) and is_own[block]:
            ring[block % RING] = (pages[block], -1)
        elif block < num_written:
            ring[block % RING] = (FRESH, pages[block])
        elif spare:
            ring[block % RING] = (spare.pop(), -1)
    return Layout(pages, slots, ring)
