"""What is known of one request's blocks: records that `BlockManager` keeps.

Owns: these words, and where a block's page stands in a table. Does not know pools or keys' makers. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minserve.memory.hashing import KeyChain
from minserve.memory.host_tier import SavedBlock

RING = 3
"""Pages of a sparse request's newest blocks (kernels/sparse_rows.py, which this side may not import)."""

NOWHERE = -1
"""In place of a host block: the block has none."""


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
    """The pages of one request: by block, or, when it is sparse, num_slots slots and the ring behind them.

    chain: the keys of its full blocks.
    hosts: the host block of each published block, or NOWHERE. It holds them, so that they are there when it has to
    give way, and so that the end of a sequence is given up before its beginning; a sparse request reads them.
    num_durable: the first so many of them are known to be complete. num_told: how many the device knows of, if sparse.
    awaited: pages that were still being filled when they were last looked at.
    """

    chain: KeyChain
    pages: list[int] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    num_published: int = 0
    num_durable: int = 0
    num_told: int = 0
    num_slots: int = 0

    @property
    def is_sparse(self) -> bool:
        return self.num_slots > 0

    def page_of(self, block: int) -> int:
        """Where a block is; of a sparse request's, one that is in the ring."""
        return self.pages[self.num_slots + block % RING] if self.is_sparse else self.pages[block]

    def let_go(self) -> list[int]:
        """The host blocks that it held, and holds no more."""
        held = [host for host in self.hosts if host != NOWHERE]
        self.hosts = [NOWHERE] * len(self.hosts)
        self.num_durable = 0
        return held


@dataclass(slots=True)
class Suspended:
    """What is kept of a request without pages: references to host blocks, and the block that was not full.

    partial_at: the position where that block begins; it holds num_partial tokens. last_use: until then launched steps
    may read the host blocks.
    """

    hosts: list[int]
    partial: SavedBlock | None
    partial_at: int
    num_partial: int
    last_use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSetPages:
    """Where a request that becomes sparse has its blocks, before and after. See `Demotion` (engine/plan.py)."""

    pages: Sequence[int]
    slot_pages: Sequence[int]
    slot_blocks: Sequence[int]
    ring_pages: Sequence[int]
    ring_copies: Sequence[tuple[int, int]]
    host_blocks: Sequence[int]
