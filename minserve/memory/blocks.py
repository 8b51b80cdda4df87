"""Which page holds which block of which request, and what is kept of those that have none.

Owns: block tables, references to pages and the prefix index (through `PlacePool` and `HostTier`). The only mutator.
Does not know: tensors, devices, or who should get a page: it is asked and answers yes or no. Imports no torch.

Of a request's blocks, in order:

    [0, shared)          found in the prefix cache, on the device or in the host tier; full, never written again
    [shared, published)  written by this request, full, findable by others, written through to the host tier
    [published, len)     being written, or full and not yet known to be right

A sparse request has a fixed number of pages, whatever its length, and they are nobody else's: what is in its slots the
device knows, and its ring holds the newest blocks. All of its full blocks are in host blocks, which serve the prefix
cache too, and no page can be found by their keys. The digest of a block lies at the place of its host block, so
digests need no account of their own.
"""

from collections.abc import Iterator, Sequence

from minserve.config import BLOCK_SIZE
from minserve.memory.copies import CopyEngine
from minserve.memory.hashing import BlockHasher, KeyChain
from minserve.memory.host_refs import HostRefs
from minserve.memory.host_tier import HostTier
from minserve.memory.pool import PlacePool, background, foreground
from minserve.memory.slots import SlotMaker, lay_out
from minserve.memory.tables import NOWHERE, RING, BlockTable, Cached, WorkingSetPages


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold num_tokens tokens."""
    return -(-num_tokens // BLOCK_SIZE)


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
        self._refs = HostRefs(self._host, self._tables)
        self._slots = SlotMaker(self._pool)

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
    def num_host_available(self) -> int:
        """Host blocks that can be had now."""
        return self._host.num_available

    @property
    def num_host_returning(self) -> int:
        """Host blocks that can be had when the launched steps have ended."""
        return self._host.num_returning

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
        chain: KeyChain,
        *,
        use_cache: bool = True,
        keep: int = 0,
        policy: bytes = b"",
    ) -> Cached | None:
        """Give a request pages for all of token_ids, with what the caches have; what is in host blocks is loaded.

        chain: the keys of the request's blocks, as far as they were known before; extended here, so that a request that
        asks again, or comes back after it was preempted, does not hash its tokens again.
        keep: pages to leave available. policy: of a request that will be sparse from its first decode on: what others
        have computed under the same policy serves it too, behind all that is exact.
        Returns how many of the tokens are, or will be when `is_ready` says so, in the pages: never all of them, since
        the last one has to be computed for its logits. None, with nothing changed, when there are too few pages, or
        what was saved of the request is not ready to be loaded.
        """
        assert request_id not in self._tables, f"{request_id} has a table already"
        if self.awaits_saved(request_id):
            return None
        branch, found = self._find(chain, token_ids, policy) if self._prefix_caching and use_cache else (chain, [])
        on_device = [page for page in found if page is not None]
        num_new = blocks_for(len(token_ids)) - len(on_device)
        from_available = sum(map(self._pool.is_available, on_device))
        # The block to grow into is asked for but not taken: a request that would have to give way at once stays out.
        room_to_grow = 1 if self._pool.num_held > 0 else 0
        if num_new + room_to_grow + from_available + keep > self._pool.num_available:
            return None
        chain.become(branch)
        for page in on_device:
            self._pool.hold(page)
        new = self._pool.allocate(num_new)
        assert new is not None
        self._tables[request_id] = table = BlockTable(chain)
        return self._fill(request_id, table, found, new, len(token_ids))

    def _find(self, chain: KeyChain, token_ids: Sequence[int], policy: bytes) -> tuple[KeyChain, list[int | None]]:
        """What is cached, and the chain to which it belongs."""
        found = list(self._find_prefix(chain, token_ids))
        if policy and chain.sparse_from is None:
            branch = chain.branch(len(found), policy)
            if len(more := list(self._find_prefix(branch, token_ids))) > len(found):
                return branch, more
        return chain, found

    def _find_prefix(self, chain: KeyChain, token_ids: Sequence[int]) -> Iterator[int | None]:
        """For each full block that is cached, in order: its page, or None where only a host block has it."""
        for block in range((len(token_ids) - 1) // BLOCK_SIZE):
            self._hasher.extend(chain, token_ids, (block + 1) * BLOCK_SIZE)
            page = self._pool.find(chain.keys[block])
            if page is None and not self._host.has(chain.keys[block]):
                return
            yield page

    def _fill(
        self, request_id: str, table: BlockTable, found: list[int | None], new: list[int], num_tokens: int
    ) -> Cached:
        """Make the table of found and new pages, and start the loads."""
        fresh = iter(new)
        num_host_tokens = 0
        for page, key in zip(found, table.chain.keys, strict=False):
            if page is None:
                page = next(fresh)
                self._pool.publish(page, key)
                self._host.load(page, key)
                num_host_tokens += BLOCK_SIZE
            table.hosts.append(self._refs.of(key))
            if self._host.is_loading(page):
                table.awaited.append(page)
            table.pages.append(page)
        table.num_published = len(found)
        table.pages.extend(fresh)
        num_found = len(found) * BLOCK_SIZE
        num_resumed = self._refs.resume(request_id, table, num_found)
        # A row that was to run again had written its token's KV already: one token is always computed, though.
        return Cached(num_found - num_host_tokens, num_host_tokens + min(num_resumed, num_tokens - 1 - num_found))

    def grow(self, request_id: str, num_tokens: int, keep: int = 0) -> list[int] | None:
        """Make room for the request's first num_tokens tokens: the new pages, or None if too few are available.

        keep: pages to leave available; a request that needs none is not held up by it. A sparse one never does.
        """
        table = self._tables[request_id]
        num_new = 0 if table.is_sparse else max(0, blocks_for(num_tokens) - len(table.pages))
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
        self._hasher.extend(table.chain, token_ids, num_tokens)
        for block in range(table.num_published, num_tokens // BLOCK_SIZE):
            if not table.is_sparse:
                self._pool.publish(table.pages[block], table.chain.keys[block])
            table.hosts.append(NOWHERE)
            table.num_published += 1
            self._refs.keep(table, block, insist=table.is_sparse)

    # ---- blocks in host blocks ----

    def secure(self, request_id: str, *, insist: bool = False) -> bool:
        """Have all full blocks of a request in host blocks, or on their way there, also those whose copy failed or that
        found no host block at first. False if there is none. insist: see `HostRefs.keep`."""
        return self._refs.secure(self._tables[request_id], insist)

    def num_unstored(self, request_id: str) -> int:
        """How many of a request's full blocks have no host block, and none on its way to them."""
        return self._refs.num_unstored(self._tables[request_id])

    def num_durable(self, request_id: str) -> int:
        """How many of a request's full blocks are complete in host blocks, from its first on."""
        return self._refs.num_durable(self._tables[request_id])

    def take_stored(self, request_id: str) -> list[tuple[int, int]]:
        """(block, host block) of a sparse request's full blocks that have become durable since the last call."""
        table = self._tables[request_id]
        told, table.num_told = table.num_told, self.num_durable(request_id)
        return [(block, table.hosts[block]) for block in range(told, table.num_told)]

    def awaits_saved(self, request_id: str) -> bool:
        """Whether what was saved of a suspended request is still on its way."""
        return self._refs.awaits_saved(request_id)

    def num_kept(self, request_id: str) -> int:
        """How many host blocks are kept for a suspended request."""
        return self._refs.num_kept(request_id)

    def forget(self, request_id: str) -> None:
        """Let go of what was kept of a suspended request; of others there is nothing to forget."""
        self._refs.forget(request_id)

    # ---- a request becomes sparse ----

    def num_returned(self, request_id: str, num_tokens: int, num_slots: int, keep: int = 0) -> int | None:
        """How many pages a request would give back by becoming sparse, on balance, as things stand: see `demote`. None
        if there are too few pages to do so."""
        copies = self._host.copies_by_page()
        is_own = self._slots.is_own(self._tables[request_id], copies)
        layout = lay_out(self._tables[request_id].pages, is_own, num_tokens, num_slots)
        return sum(is_own) - num_slots - RING if self._slots.can_have(layout, keep) else None

    def demote(
        self, request_id: str, num_tokens: int, num_slots: int, policy: bytes, *, step: int, keep: int = 0
    ) -> WorkingSetPages | None:
        """Make a request sparse, in its own pages: num_slots slots and the ring. Step `step` does so on the device.

        None of its rows is under way; of its num_tokens tokens all but the last have KV, and all full blocks are
        durable. Pages that others hold too are let go, others that it does not need are given back, when the step has
        ended; new ones take the place of what is missing. The block that is not full, and all later ones, are
        computed under the policy: see `KeyChain`. keep: pages to leave available. None, with nothing changed, if there
        are too few.
        """
        table = self._tables[request_id]
        num_full = (num_tokens - 1) // BLOCK_SIZE
        assert self.num_durable(request_id) == num_full == table.num_published, f"{request_id} has blocks in pages only"
        places = self._slots.make(table, num_tokens, num_slots, step, keep)
        if places is not None and table.chain.sparse_from is None:
            table.chain.become(table.chain.branch(num_full, policy))
        return places

    # ---- a request gives pages back ----

    def suspend(self, request_id: str, num_computed: int, last_step: int) -> None:
        """Take a request's pages, and keep what it has computed in host blocks, as far as there are any.

        num_computed: tokens whose KV is in the pages when step last_step has ended. When the request comes back, `open`
        loads them. If host blocks run out, the request that was suspended first loses its own.
        """
        ready = self.is_ready(request_id)
        self._refs.suspend(request_id, self._tables[request_id], num_computed if ready else 0, last_step)
        self.close(request_id, last_step)

    def close(self, request_id: str, last_step: int) -> None:
        """Take a request's pages back; they are reused when step last_step has ended, also its background pass if the
        request is sparse."""
        table = self._tables.pop(request_id)
        last_use = background(last_step) if table.is_sparse else foreground(last_step)
        self._pool.release(table.pages, last_use)
        self._host.release(table.let_go(), last_use if table.is_sparse else 0)

    # ---- time passes ----

    def end_step(self, step: int) -> None:
        """The result of step `step` is there: so is all that was before, in the background too."""
        self._pool.end_step(foreground(step))
        self._host.end_use(foreground(step))
        self._host.end_step(step)

    def end_background(self, step: int) -> None:
        """The background pass of step `step` has ended."""
        self._pool.end_step(background(step))
        self._host.end_use(background(step))

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
        copies = self._host.copies_by_page()
        self._pool.check([*in_tables, *copies.elements()])
        self._host.check(self._refs.held())
        for request_id, table in self._tables.items():
            assert len(set(table.pages)) == len(table.pages), f"{request_id} has a page twice"
            assert len(table.hosts) == table.num_published, f"{request_id} published what it has no entry for"
            if table.is_sparse:
                self._slots.check(table, copies)
            else:
                assert table.num_published <= len(table.pages), f"{request_id} published more than it has"
        assert not self._tables.keys() & self._refs.suspended.keys(), "a request has pages and is suspended"
