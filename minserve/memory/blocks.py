"""Which page holds which block of which request, and what is kept of those that have none.

Owns: block tables, references to pages and the prefix index (through `PlacePool` and `HostTier`). The only mutator.
Does not know: tensors, devices, or who should get a page: it is asked and answers yes or no. Imports no torch.

Of a request's blocks, in order:

    [0, shared)          found in the prefix cache, on the device or in the host tier; full, never written again
    [shared, published)  written by this request, full, findable by others, written through to the host tier
    [published, len)     being written, or full and not yet known to be right
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minserve.config import BLOCK_SIZE
from minserve.memory.copies import CopyEngine
from minserve.memory.hashing import BlockHasher
from minserve.memory.host_tier import HostTier, SavedBlock
from minserve.memory.pool import PlacePool


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Cached:
    """Tokens that a request need not compute: found in pages, and loaded from host blocks."""

    device: int
    host: int

    @property
    def num_tokens(self) -> int:
        return self.device + self.host


NOTHING_CACHED = Cached(0, 0)


@dataclass(slots=True)
class BlockTable:
    """The pages of one request, by block. keys: those of its full blocks, as far as known.

    hosts: the host blocks of its full blocks, in order, as far as there are any; it holds them, so that they are there
    when it has to give way, and so that the end of a sequence is given up before its beginning.
    awaited: pages that were still being filled when they were last looked at.
    """

    salt: str
    keys: list[bytes]
    pages: list[int] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    num_published: int = 0


@dataclass(slots=True)
class Suspended:
    """What is kept of a request without pages: references to host blocks, and the block that was not full.

    partial_at: the position where that block begins; it holds num_partial tokens.
    """

    hosts: list[int]
    partial: SavedBlock | None
    partial_at: int
    num_partial: int


class BlockManager:
    """Pages for requests. Every page that a table names has one reference from it.

    num_host_blocks and copies: the host tier; 0 and any engine: none.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        secret: bytes,
        prefix_caching: bool,
        num_host_blocks: int,
        copies: CopyEngine,
    ) -> None:
        self.num_pages = num_pages
        self._pool = PlacePool(num_pages)
        self._host = HostTier(num_host_blocks, self._pool, copies)
        self._hasher = BlockHasher(secret)
        self._prefix_caching = prefix_caching
        self._tables: dict[str, BlockTable] = {}
        self._suspended: dict[str, Suspended] = {}

    @property
    def num_available(self) -> int:
        """Pages that can be had now."""
        return self._pool.num_available

    @property
    def num_returning(self) -> int:
        """Pages that can be had when the launched steps and the copies under way have ended."""
        return self._pool.num_quarantined + self._host.num_pages_returning()

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def num_host_held(self) -> int:
        """Host blocks that copies or requests hold."""
        return self._host.num_held

    @property
    def num_host_used(self) -> int:
        """Host blocks with something in them, needed now or not."""
        return self._host.num_used

    @property
    def num_copies(self) -> int:
        """Copies under way."""
        return self._host.num_copies

    def pages(self, request_id: str) -> Sequence[int]:
        """The pages of a request, by block."""
        return self._tables[request_id].pages

    def is_ready(self, request_id: str) -> bool:
        """Whether all that was found for a request is in its pages by now."""
        table = self._tables[request_id]
        table.awaited = [page for page in table.awaited if self._host.is_loading(page)]
        return not table.awaited

    # ---- a request takes pages ----

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        salt: str,
        keys: list[bytes],
        *,
        use_cache: bool = True,
        keep: int = 0,
    ) -> Cached | None:
        """Give a request pages for all of token_ids, with what the caches have; what is in host blocks is loaded.

        keys: those of the request's blocks, as far as they were known before; extended here, so that a request that
        asks again, or comes back after it was preempted, does not hash its tokens again.
        keep: pages to leave available.
        Returns how many of the tokens are, or will be when `is_ready` says so, in the pages: never all of them, since
        the last one has to be computed for its logits. None, with nothing changed, when there are too few pages, or
        what was saved of the request is not ready to be loaded.
        """
        assert request_id not in self._tables, f"{request_id} has a table already"
        saved = self._suspended.get(request_id)
        if saved is not None and saved.partial is not None and not (saved.partial.ready or saved.partial.failed):
            return None
        table = BlockTable(salt, keys)
        found = list(self._find_prefix(table, token_ids)) if self._prefix_caching and use_cache else []
        on_device = [page for page in found if page is not None]
        num_new = blocks_for(len(token_ids)) - len(on_device)
        from_available = sum(map(self._pool.is_available, on_device))
        # The block to grow into is asked for but not taken: a request that would have to give way at once stays out.
        room_to_grow = 1 if self._pool.num_held > 0 else 0
        if num_new + room_to_grow + from_available + keep > self._pool.num_available:
            return None
        for page in on_device:
            self._pool.hold(page)
        new = self._pool.allocate(num_new)
        assert new is not None
        self._tables[request_id] = table
        return self._fill(request_id, table, found, new)

    def _find_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> Iterator[int | None]:
        """For each full block that is cached, in order: its page, or None where only a host block has it."""
        self._hasher.extend(table.keys, token_ids, len(token_ids) - 1, table.salt)
        for key in table.keys[: (len(token_ids) - 1) // BLOCK_SIZE]:
            page = self._pool.find(key)
            if page is None and not self._host.has(key):
                return
            yield page

    def _fill(self, request_id: str, table: BlockTable, found: list[int | None], new: list[int]) -> Cached:
        """Make the table of found and new pages, and start the loads."""
        fresh = iter(new)
        num_host_tokens = 0
        for page, key in zip(found, table.keys, strict=False):
            if page is None:
                page = next(fresh)
                self._pool.publish(page, key)
                self._host.load(page, key)
                num_host_tokens += BLOCK_SIZE
            self._hold_host(table, key)
            if self._host.is_loading(page):
                table.awaited.append(page)
            table.pages.append(page)
        table.num_published = len(found)
        table.pages.extend(fresh)
        num_device_tokens = len(found) * BLOCK_SIZE - num_host_tokens
        return Cached(num_device_tokens, num_host_tokens + self._resume(request_id, table, len(found) * BLOCK_SIZE))

    def _resume(self, request_id: str, table: BlockTable, num_found: int) -> int:
        """Load what was saved beyond the blocks that were found; let go of the rest. How many tokens that gives."""
        saved = self._suspended.pop(request_id, None)
        if saved is None:
            return 0
        num_tokens = 0
        if saved.partial is not None:
            if saved.partial.ready and saved.partial_at == num_found:
                page = table.pages[num_found // BLOCK_SIZE]
                self._host.load_saved(page, saved.partial)
                table.awaited.append(page)
                num_tokens = saved.num_partial
            self._host.release([saved.partial.host])
        self._host.release(saved.hosts)
        return num_tokens

    def grow(self, request_id: str, num_tokens: int, keep: int = 0) -> list[int] | None:
        """Make room for the request's first num_tokens tokens: the new pages, or None if too few are available.

        keep: pages to leave available; a request that needs none is not held up by it.
        """
        table = self._tables[request_id]
        num_new = max(0, blocks_for(num_tokens) - len(table.pages))
        if num_new and num_new + keep > self._pool.num_available:
            return None
        new = self._pool.allocate(num_new)
        assert new is not None
        table.pages.extend(new)
        return new

    def publish(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """The KV of the first num_tokens tokens is in the pages and right: let full blocks be found and written out."""
        if not self._prefix_caching:
            return
        table = self._tables[request_id]
        self._hasher.extend(table.keys, token_ids, num_tokens, table.salt)
        for block in range(table.num_published, num_tokens // BLOCK_SIZE):
            self._pool.publish(table.pages[block], table.keys[block])
            self._host.store(table.pages[block], table.keys[block])
            self._hold_host(table, table.keys[block])
        table.num_published = max(table.num_published, num_tokens // BLOCK_SIZE)

    def _hold_host(self, table: BlockTable, key: bytes) -> None:
        host = self._host.hold(key)
        if host is not None:
            table.hosts.append(host)

    # ---- a request gives pages back ----

    def suspend(self, request_id: str, num_computed: int, last_step: int) -> None:
        """Take a request's pages, and keep what it has computed in host blocks, as far as there are any.

        num_computed: tokens whose KV is in the pages when step last_step has ended. When the request comes back, `open`
        loads them. If host blocks run out, the request that was suspended first loses its own.
        """
        table = self._tables[request_id]
        num_full, num_partial = divmod(num_computed, BLOCK_SIZE)
        suspended = Suspended(table.hosts, None, num_full * BLOCK_SIZE, num_partial)
        table.hosts = []
        # Blocks that launched steps have filled but nobody has seen are lost, and what comes after them is of no use.
        if num_partial and num_full == table.num_published and self.is_ready(request_id) and self._host.num_blocks:
            while (partial := self._host.save(table.pages[num_full], last_step)) is None and self._suspended:
                self.forget(next(iter(self._suspended)))
            suspended.partial = partial
        self._suspended[request_id] = suspended
        self.close(request_id, last_step)

    def forget(self, request_id: str) -> None:
        """Let go of what was kept of a suspended request; of others there is nothing to forget."""
        saved = self._suspended.pop(request_id, None)
        if saved is not None:
            self._host.release(saved.hosts + ([saved.partial.host] if saved.partial is not None else []))

    def close(self, request_id: str, last_step: int) -> None:
        """Take a request's pages back; they are reused when step last_step has ended."""
        table = self._tables.pop(request_id)
        self._pool.release(table.pages, last_step)
        self._host.release(table.hosts)

    # ---- time passes ----

    def end_step(self, step: int) -> None:
        """Step `step` has ended on the device."""
        self._pool.end_step(step)
        self._host.end_step(step)

    def poll_copies(self) -> list[str]:
        """Take in the copies that have ended. Returns the requests whose pages could not be filled: close them."""
        failed = set(self._host.poll())
        if not failed:
            return []
        return [request_id for request_id, table in self._tables.items() if failed.intersection(table.awaited)]

    def forget_pages(self) -> None:
        """Forget every prefix that is cached in pages; those in host blocks are found as before."""
        self._pool.forget_all()

    def clear_cache(self) -> None:
        """Forget every cached prefix."""
        self._pool.forget_all()
        self._host.forget_all()

    def check(self) -> None:
        """Assert every invariant of tables, pool and host tier."""
        in_tables = [page for table in self._tables.values() for page in table.pages]
        self._pool.check(in_tables + self._host.pages_in_copies())
        self._host.check(self._hosts_of_requests())
        for request_id, table in self._tables.items():
            assert len(set(table.pages)) == len(table.pages), f"{request_id} has a page twice"
            assert table.num_published <= len(table.pages), f"{request_id} published more than it has"
        assert not self._tables.keys() & self._suspended.keys(), "a request has pages and is suspended"

    def _hosts_of_requests(self) -> Iterator[int]:
        for table in self._tables.values():
            yield from table.hosts
        for saved in self._suspended.values():
            yield from saved.hosts
            if saved.partial is not None:
                yield saved.partial.host
