"""Which full blocks have host blocks, what is kept there of requests that gave way, and who loses it if there are none.

Owns: these references. Does not know: keys' makers, pages beyond where a block is, or who should give way.
Imports no torch.
"""

from collections.abc import Iterator

from minserve.config import BLOCK_SIZE
from minserve.memory.host_tier import HostTier
from minserve.memory.pool import background
from minserve.memory.tables import NOWHERE, BlockTable, Suspended


class HostRefs:
    """tables: of the requests that have pages, in the order of their opening; suspended: of those that gave way."""

    def __init__(self, host: HostTier, tables: dict[str, BlockTable]) -> None:
        self._host = host
        self._tables = tables
        self.suspended: dict[str, Suspended] = {}

    def of(self, key: bytes) -> int:
        """The host block with this key, here or on its way, with one reference more; or NOWHERE."""
        host = self._host.hold(key)
        return NOWHERE if host is None else host

    def keep(self, table: BlockTable, block: int, insist: bool) -> bool:
        """Have a full block, which is in a page, in a host block or on its way there. False if there is no host block.

        insist: those who hold host blocks for their own convenience give them up, if it has to be.
        """
        key = table.chain.keys[block]
        self._host.store(table.page_of(block), key)
        while (host := self.of(key)) == NOWHERE:
            if not (insist and self._make_room()):
                return False
            self._host.store(table.page_of(block), key)
        table.hosts[block] = host
        return True

    def _make_room(self) -> bool:
        """Let go of what is convenient: what the request that was suspended first would come back with, then what a
        resident one would give way with. False if there is nothing, or blocks are coming back."""
        if self._host.num_returning:
            return False
        if self.suspended:
            self.forget(next(iter(self.suspended)))
            return True
        for table in reversed(self._tables.values()):
            if not table.is_sparse and (held := table.let_go()):
                self._host.release(held)
                return True
        return False

    def secure(self, table: BlockTable, insist: bool) -> bool:
        """`keep` all full blocks, also those whose copy failed."""
        for block in range(table.num_durable, table.num_published):
            host = table.hosts[block]
            if host != NOWHERE and self._host.has_failed(host):
                self._host.release([host])
                table.hosts[block] = host = NOWHERE
            if host == NOWHERE and not self.keep(table, block, insist):
                return False
        return True

    def num_unstored(self, table: BlockTable) -> int:
        """How many full blocks have no host block, and none on its way to them."""
        return sum(host == NOWHERE or self._host.has_failed(host) for host in table.hosts[table.num_durable :])

    def num_durable(self, table: BlockTable) -> int:
        """How many full blocks are complete in host blocks, from the first on."""
        while table.num_durable < table.num_published:
            host = table.hosts[table.num_durable]
            if host == NOWHERE or not self._host.is_complete(host):
                break
            table.num_durable += 1
        return table.num_durable

    # ---- requests that gave way ----

    def suspend(self, request_id: str, table: BlockTable, num_computed: int, last_step: int) -> None:
        """Take over a table's references, and save its block that is not full. See `BlockManager.suspend`.

        num_computed: 0: what is in its pages is of no use.
        """
        num_full, num_partial = divmod(num_computed, BLOCK_SIZE)
        last_use = background(last_step) if table.is_sparse else 0
        suspended = Suspended(table.let_go(), None, num_full * BLOCK_SIZE, num_partial, last_use)
        # Blocks that launched steps have filled but nobody has seen are lost, and what comes after them is of no use.
        if num_partial and num_full == table.num_published and self._host.num_blocks:
            while (partial := self._host.save(table.page_of(num_full), last_step)) is None and self.suspended:
                self.forget(next(iter(self.suspended)))
            suspended.partial = partial
        self.suspended[request_id] = suspended

    def resume(self, request_id: str, table: BlockTable, num_found: int) -> int:
        """Load what was saved beyond the blocks that were found; let go of the rest. How many tokens that gives."""
        saved = self.suspended.pop(request_id, None)
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
        self._host.release(saved.hosts, saved.last_use)
        return num_tokens

    def awaits_saved(self, request_id: str) -> bool:
        """Whether what was saved of a suspended request is still on its way."""
        saved = self.suspended.get(request_id)
        return saved is not None and saved.partial is not None and not (saved.partial.ready or saved.partial.failed)

    def num_kept(self, request_id: str) -> int:
        """How many host blocks are kept for a suspended request."""
        saved = self.suspended.get(request_id)
        return 0 if saved is None else len(saved.hosts)

    def forget(self, request_id: str) -> None:
        """Let go of what was kept of a suspended request; of others there is nothing to forget."""
        saved = self.suspended.pop(request_id, None)
        if saved is not None:
            self._host.release(saved.hosts, saved.last_use)
            if saved.partial is not None:
                self._host.release([saved.partial.host])

    def held(self) -> Iterator[int]:
        """Host blocks, once for each reference."""
        for table in self._tables.values():
            yield from (host for host in table.hosts if host != NOWHERE)
        for saved in self.suspended.values():
            yield from saved.hosts
            if saved.partial is not None:
                yield saved.partial.host
