"""Host blocks: what is in them, and the copies between them and pages.

Owns: references and keys of host blocks, every copy under way, and the references that a copy has on both its ends: a
page or a host block with a copy in flight is not free, whoever asks. The only one who talks to the copy engine.
Does not know: requests, tokens, tensors. Imports no torch.

A host block can be found only when the copy that fills it has been seen to end. A completion names its copy by a number
that is never used again, so a late or repeated one finds nothing to do.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minserve.memory.copies import Copy, CopyEngine
from minserve.memory.pool import PlacePool


@dataclass(slots=True)
class SavedBlock:
    """A host block of one request alone, without a key: a block that is not full. ready: its copy has ended."""

    host: int
    ready: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class InFlight:
    """A copy under way. key: what a store will be found by; saved: what a private store fills."""

    copy: Copy
    key: bytes | None
    saved: SavedBlock | None


class HostTier:
    """`num_blocks` host blocks; with none, it never holds anything. pages: the pool whose places are copied.

    In flight are the copies that have not been seen to end, also those that wait for a step (_deferred: its number
    and the copy). _loading: by page, the copy that fills it. _storing: by key, the host block that is being filled.
    _filling: host blocks that are being filled; _failed: those whose copy failed.
    """

    def __init__(self, num_blocks: int, pages: PlacePool, engine: CopyEngine) -> None:
        self._pages = pages
        self._blocks = PlacePool(num_blocks)
        self._engine = engine
        self._in_flight: dict[int, InFlight] = {}
        self._loading: dict[int, int] = {}
        self._storing: dict[bytes, int] = {}
        self._filling: set[int] = set()
        self._failed: set[int] = set()
        self._deferred: list[tuple[int, Copy]] = []
        self._num_copies = 0
        self._ended_step = 0

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_places

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self._blocks.num_held

    @property
    def num_available(self) -> int:
        """Blocks that can be had now."""
        return self._blocks.num_available

    @property
    def num_returning(self) -> int:
        """Blocks that can be had when the launched steps have ended."""
        return self._blocks.num_quarantined

    @property
    def num_used(self) -> int:
        """Blocks with something in them."""
        return self._blocks.num_places - self._blocks.num_free

    @property
    def num_copies(self) -> int:
        """Copies under way."""
        return len(self._in_flight)

    def has(self, key: bytes) -> bool:
        """Whether the block of this key can be loaded."""
        return self._blocks.find(key) is not None

    def is_loading(self, page: int) -> bool:
        """Whether the page is still being filled."""
        return page in self._loading

    def is_complete(self, host: int) -> bool:
        """Whether a held block has been seen to have what its copy brings."""
        return host not in self._filling and host not in self._failed

    def has_failed(self, host: int) -> bool:
        """Whether a held block will never have what its copy should have brought."""
        return host in self._failed

    def num_pages_returning(self) -> int:
        """Pages that nobody but copies holds: they are free when these have ended."""
        return sum(self._pages.num_holders(page) == count for page, count in self.copies_by_page().items())

    def copies_by_page(self) -> Counter[int]:
        """How many copies under way each page has."""
        return Counter(entry.copy.page for entry in self._in_flight.values())

    def store(self, page: int, key: bytes) -> None:
        """Write a full block through, unless it is there or on its way, or no host block can be had."""
        if self.has(key) or key in self._storing:
            return
        host = self._blocks.allocate(1)
        if host is not None:
            self._storing[key] = host[0]
            self._engine.submit([self._start("store", page, host[0], key=key)])

    def save(self, page: int, last_step: int) -> SavedBlock | None:
        """Keep a block that is not full, as it will be after step last_step. None if no host block can be had."""
        host = self._blocks.allocate(1)
        if host is None:
            return None
        saved = SavedBlock(host[0])
        copy = self._start("store", page, saved.host, saved=saved)
        if last_step <= self._ended_step:
            self._engine.submit([copy])
        else:
            self._deferred.append((last_step, copy))
        return saved

    def load(self, page: int, key: bytes) -> None:
        """Fill a page with the block of this key, which `has` said is here."""
        host = self._blocks.find(key)
        assert host is not None
        self._load(page, host, key)

    def load_saved(self, page: int, saved: SavedBlock) -> None:
        """Fill a page with a saved block that is ready."""
        assert saved.ready
        self._load(page, saved.host, None)

    def hold(self, key: bytes) -> int | None:
        """Keep the block of this key, here or on its way, until `release`: one reference. None if there is no such."""
        host = self._blocks.find(key)
        if host is None:
            host = self._storing.get(key)
        if host is not None:
            self._blocks.hold(host)
        return host

    def release(self, hosts: list[int], last_use: int = 0) -> None:
        """Give up references. Until last_use has ended (see `PlacePool`), launched steps may read the blocks."""
        self._blocks.release(hosts, last_use)

    def end_use(self, use: int) -> None:
        """What has this number has ended, and all before it: see `PlacePool.end_step`."""
        self._blocks.end_step(use)

    def end_step(self, step: int) -> None:
        """Step `step` has ended: what waited for it can be copied."""
        self._ended_step = step
        due = [copy for last_step, copy in self._deferred if last_step <= step]
        if due:
            self._deferred = [entry for entry in self._deferred if entry[0] > step]
            self._engine.submit(due)

    def poll(self) -> list[int]:
        """Take in the copies that have ended. Returns the pages whose load failed; their keys are gone."""
        failed_pages = []
        for completion in self._engine.poll():
            entry = self._in_flight.pop(completion.copy_id, None)
            if entry is None:
                continue
            if entry.copy.kind == "store":
                self._end_store(entry, completion.ok)
            elif not self._end_load(entry, completion.ok):
                failed_pages.append(entry.copy.page)
            self._pages.release([entry.copy.page], 0)
            self._blocks.release([entry.copy.host], 0)
        return failed_pages

    def forget_all(self) -> None:
        """Drop every key, also of the blocks that are on their way; their copies go on."""
        self._blocks.forget_all()
        self._storing.clear()

    def _load(self, page: int, host: int, key: bytes | None) -> None:
        self._blocks.hold(host)
        copy = self._start("load", page, host, key=key)
        self._loading[page] = copy.id
        self._engine.submit([copy])

    def _start(
        self,
        kind: Literal["store", "load"],
        page: int,
        host: int,
        *,
        key: bytes | None = None,
        saved: SavedBlock | None = None,
    ) -> Copy:
        """A new copy. It has a reference on its page, and takes over the caller's on its host block."""
        self._num_copies += 1
        copy = Copy(self._num_copies, kind, page, host)
        self._in_flight[copy.id] = InFlight(copy, key, saved)
        self._pages.hold(page)
        if kind == "store":
            self._filling.add(host)
            self._failed.discard(host)
        if saved is not None:
            self._blocks.hold(host)  # the saved block's own, beside the copy's
        return copy

    def _end_store(self, entry: InFlight, ok: bool) -> None:
        self._filling.discard(entry.copy.host)
        if not ok:
            self._failed.add(entry.copy.host)
        if entry.key is not None and self._storing.get(entry.key) == entry.copy.host:  # else it was forgotten
            del self._storing[entry.key]
            if ok:
                self._blocks.publish(entry.copy.host, entry.key)
        if entry.saved is not None:
            entry.saved.ready, entry.saved.failed = ok, not ok

    def _end_load(self, entry: InFlight, ok: bool) -> bool:
        del self._loading[entry.copy.page]
        if not ok and entry.key is not None:
            self._pages.unpublish(entry.copy.page)
            if self._blocks.find(entry.key) == entry.copy.host:
                self._blocks.unpublish(entry.copy.host)
        return ok

    def check(self, held: Iterator[int]) -> None:
        """Assert every invariant. held: host blocks, once for each reference from outside."""
        copies = [entry.copy for entry in self._in_flight.values()]
        self._blocks.check([*held, *(copy.host for copy in copies)])
        loads = {copy.page: copy.id for copy in copies if copy.kind == "load"}
        assert loads == self._loading, "loading pages and loads under way differ"
        filling = {copy.host for copy in copies if copy.kind == "store"}
        assert filling == self._filling, "blocks that are being filled and stores under way differ"
