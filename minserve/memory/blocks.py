"""Which page holds which block of which request.

Owns: block tables, reference counts and the prefix index (through `PlacePool`). The only mutator of these.
Does not know: tensors, devices, or who should get a page: it is asked and answers yes or no. Imports no torch.

Of a request's blocks, in order:

    [0, shared)          found in the prefix cache, perhaps held by others too; full, never written again
    [shared, published)  written by this request, full, findable by others
    [published, len)     being written, or full and not yet known to be right
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minserve.config import BLOCK_SIZE
from minserve.memory.hashing import BlockHasher
from minserve.memory.pool import PlacePool


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True)
class BlockTable:
    """The pages of one request, by block. keys: those of its full blocks, as far as known."""

    salt: str
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0


class BlockManager:
    """Pages for requests. Every page that a table names has one reference from it."""

    def __init__(self, num_pages: int, *, secret: bytes, prefix_caching: bool) -> None:
        self.num_pages = num_pages
        self._pool = PlacePool(num_pages)
        self._hasher = BlockHasher(secret)
        self._prefix_caching = prefix_caching
        self._tables: dict[str, BlockTable] = {}

    @property
    def num_available(self) -> int:
        """Pages that can be had now."""
        return self._pool.num_available

    @property
    def num_quarantined(self) -> int:
        """Pages that can be had when the launched steps have ended."""
        return self._pool.num_quarantined

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    def pages(self, request_id: str) -> Sequence[int]:
        """The pages of a request, by block."""
        return self._tables[request_id].pages

    def open(
        self, request_id: str, token_ids: Sequence[int], salt: str, keys: list[bytes], *, use_cache: bool = True
    ) -> int | None:
        """Give a request pages for all of token_ids, with what the prefix cache has.

        keys: those of the request's blocks, as far as they were known before; extended here, so that a request that
        asks again, or comes back after it was preempted, does not hash its tokens again.
        Returns how many of the tokens are already in the pages (full blocks, and never all tokens: the last one has
        to be computed for its logits), or None, with nothing changed, when there are too few pages.
        """
        assert request_id not in self._tables, f"{request_id} has a table already"
        table = BlockTable(salt, keys=keys)
        found = list(self._cached_prefix(table, token_ids)) if self._prefix_caching and use_cache else []
        num_new = blocks_for(len(token_ids)) - len(found)
        from_available = sum(map(self._pool.is_available, found))
        # The block to grow into is asked for but not taken: a request that would have to give way at once stays out.
        if num_new + 1 + from_available > self._pool.num_available and self._pool.num_held > 0:
            return None
        if num_new + from_available > self._pool.num_available:
            return None
        for page in found:
            self._pool.hold(page)
        new = self._pool.allocate(num_new)
        assert new is not None
        table.pages = found + new
        table.num_published = len(found)
        self._tables[request_id] = table
        return len(found) * BLOCK_SIZE

    def grow(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make room for the request's first num_tokens tokens; the new pages, or None if too few are available."""
        table = self._tables[request_id]
        new = self._pool.allocate(max(0, blocks_for(num_tokens) - len(table.pages)))
        if new is not None:
            table.pages.extend(new)
        return new

    def publish(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """The KV of the first num_tokens tokens is in the pages and right: let full blocks be found."""
        if not self._prefix_caching:
            return
        table = self._tables[request_id]
        self._hasher.extend(table.keys, token_ids, num_tokens, table.salt)
        for block in range(table.num_published, num_tokens // BLOCK_SIZE):
            self._pool.publish(table.pages[block], table.keys[block])
        table.num_published = max(table.num_published, num_tokens // BLOCK_SIZE)

    def close(self, request_id: str, last_step: int) -> None:
        """Take a request's pages back; they are reused when step last_step has ended."""
        self._pool.release(self._tables.pop(request_id).pages, last_step)

    def end_step(self, step: int) -> None:
        """Step `step` has ended on the device."""
        self._pool.end_step(step)

    def clear_cache(self) -> None:
        """Forget every cached prefix."""
        self._pool.forget_all()

    def _cached_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> Iterator[int]:
        self._hasher.extend(table.keys, token_ids, len(token_ids) - 1, table.salt)
        for key in table.keys[: (len(token_ids) - 1) // BLOCK_SIZE]:
            page = self._pool.find(key)
            if page is None:
                return
            yield page

    def check(self) -> None:
        """Assert every invariant of tables and pool."""
        self._pool.check(page for table in self._tables.values() for page in table.pages)
        for request_id, table in self._tables.items():
            assert len(set(table.pages)) == len(table.pages), f"{request_id} has a page twice"
            assert table.num_published <= len(table.pages), f"{request_id} published more than it has"
