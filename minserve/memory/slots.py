"""Which of a resident request's pages become its slots and its ring when it becomes sparse.

Owns: that choice, and carries it out in a table. Does not know: when, or for whom. Imports no torch.

As much as possible stays where it is. A page that somebody else holds too is copied from, and never written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minserve.config import BLOCK_SIZE
from minserve.memory.pool import PlacePool, foreground
from minserve.memory.tables import RING, BlockTable, WorkingSetPages

FRESH = -1
"""In place of a page: a new one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """slots: (page, block that it holds or -1); ring: (page, page that is copied there first or -1)."""

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


class SlotMaker:
    """Makes tables sparse. pool: the pages."""

    def __init__(self, pool: PlacePool) -> None:
        self._pool = pool

    def is_own(self, table: BlockTable, copies: Mapping[int, int]) -> list[bool]:
        """For each page of a table, whether nobody else holds it, but for so many copies."""
        return [self._pool.num_holders(page) - copies.get(page, 0) == 1 for page in table.pages]

    def can_have(self, layout: Layout, keep: int) -> bool:
        """Whether there are pages for a layout, with so many to spare if it needs any."""
        return not layout.num_fresh or layout.num_fresh + keep <= self._pool.num_available

    def make(self, table: BlockTable, num_tokens: int, num_slots: int, step: int, keep: int) -> WorkingSetPages | None:
        """See `BlockManager.demote`."""
        assert not table.is_sparse
        layout = lay_out(table.pages, self.is_own(table, {}), num_tokens, num_slots)
        if not self.can_have(layout, keep):
            return None
        fresh = self._pool.allocate(layout.num_fresh)
        assert fresh is not None
        start = ring_start(num_tokens)
        places = layout.filled(iter(fresh), table.hosts[:start])
        table.pages = [*places.slot_pages, *places.ring_pages]
        for page in table.pages:
            self._pool.unpublish(page)  # its content will change, and the block is in a host block
        kept = set(table.pages)
        self._pool.release([page for page in places.pages if page not in kept], foreground(step))
        table.num_slots, table.num_told, table.awaited = num_slots, start, []
        return places

    def check(self, table: BlockTable, copies: Mapping[int, int]) -> None:
        """Assert that a sparse table's pages are nobody else's, and found by nobody."""
        assert len(table.pages) == table.num_slots + RING, "a table has lost or found a page"
        assert all(self.is_own(table, copies)), "a page of slots or ring is shared"
        assert not any(map(self._pool.is_published, table.pages)), "a page of slots or ring can be found"
