"""Planted bugs: each breaks one rule in one place, as a careless change would. The simulation has to find every one."""

from contextlib import contextmanager
from types import SimpleNamespace

from minserve.engine.request import Status
from minserve.engine.reserve import PrefillReserve
from minserve.engine.scheduler import Scheduler
from minserve.memory.blocks import BlockManager
from minserve.memory.hashing import BlockHasher
from minserve.memory.host_refs import HostRefs
from minserve.memory.host_tier import HostTier
from minserve.memory.pool import PlacePool
from tests.sim.device import Device

BUGS = {}


def bug(rule):
    """Register a bug: a function that returns (owner, attribute, replacement)."""

    def register(make):
        BUGS[rule] = make
        return make

    return register


@contextmanager
def planted(rule):
    owner, name, replacement = BUGS[rule]()
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@bug("a page with a copy in flight is free")
def free_under_copy():
    original = HostTier._start

    def start(self, *args, **kwargs):
        copy = original(self, *args, **kwargs)
        self._pages.release([copy.page], 0)
        return copy

    return HostTier, "_start", start


@bug("a page is reused while a launched step may read it")
def no_quarantine():
    original = PlacePool.release
    return PlacePool, "release", lambda self, places, last_step: original(self, places, 0)


@bug("quarantine ends one step early")
def short_quarantine():
    original = PlacePool.end_step
    return PlacePool, "end_step", lambda self, step: original(self, step + 2)


@bug("a hash is published before its block is durable")
def early_hash():
    original = HostTier.store

    def store(self, page, key):
        original(self, page, key)
        if key in self._storing:
            self._blocks.publish(self._storing[key], key)

    return HostTier, "store", store


@bug("a shared page gets no reference")
def missing_reference():
    original = BlockManager.open

    def open_(self, *args, **kwargs):
        pool = self._pool
        hold, pool.hold = pool.hold, lambda place: None if pool.num_holders(place) else hold(place)
        try:
            return original(self, *args, **kwargs)
        finally:
            del pool.hold

    return BlockManager, "open", open_


@bug("a staging buffer is reused before its copy has run")
def staging_reuse():
    return Device, "staging_buffer", lambda self, copy: copy.id % 2


@bug("a completion is believed twice")
def no_generation():
    original = HostTier.poll

    def poll(self):
        seen = self.__dict__.setdefault("seen", {})
        seen.update(self._in_flight)
        completions = self._engine.poll()
        for completion in completions:
            self._in_flight.setdefault(completion.copy_id, seen[completion.copy_id])
            engine, self._engine = self._engine, SimpleNamespace(poll=lambda done=completion: [done])
            try:
                yield from original(self)
            finally:
                self._engine = engine

    return HostTier, "poll", lambda self: list(poll(self))


@bug("an aborted request leaks what was saved of it")
def leak_on_abort():
    original = Scheduler._finish

    def finish(self, request, reason):
        self._blocks.forget = lambda request_id: None
        try:
            original(self, request, reason)
        finally:
            del self._blocks.forget

    return Scheduler, "_finish", finish


@bug("the oldest request gives way")
def livelock():
    original = Scheduler._preempt
    return Scheduler, "_preempt", lambda self, _, decisions: original(self, self.running[0], decisions)


@bug("a block counts as full one token early")
def block_edge():
    original = BlockManager.publish

    def publish(self, request_id, token_ids, num_tokens):
        original(self, request_id, token_ids, min(num_tokens + 1, len(token_ids)))

    return BlockManager, "publish", publish


@bug("an unfinished block is saved before the step that writes it has ended")
def early_save():
    original = HostTier.save
    return HostTier, "save", lambda self, page, last_step: original(self, page, 0)


@bug("a host block is loaded before it was saved")
def early_resume():
    original = BlockManager.open

    def open_(self, request_id, *args, **kwargs):
        saved = self._refs.suspended.get(request_id)
        if saved is not None and saved.partial is not None:
            saved.partial.ready = True
        return original(self, request_id, *args, **kwargs)

    return BlockManager, "open", open_


@bug("what was saved is resumed at the wrong place")
def wrong_place():
    original = HostRefs.resume

    def resume(self, request_id, table, num_found):
        saved = self.suspended.get(request_id)
        if saved is not None:
            saved.partial_at = num_found
        return original(self, request_id, table, num_found)

    return HostRefs, "resume", resume


@bug("a request runs before its pages are loaded")
def unready():
    return BlockManager, "is_ready", lambda self, request_id: True


@bug("a failed load is taken for a good one")
def failed_load():
    original = HostTier.poll
    return HostTier, "poll", lambda self: original(self) and []


@bug("tenants share blocks in spite of their salts")
def no_salt():
    original = BlockHasher.extend

    def extend(self, chain, *args):
        chain.salt = ""
        original(self, chain, *args)

    return BlockHasher, "extend", extend


@bug("the last block of a prompt is shared although it is not full")
def partial_tail():
    original = BlockHasher.extend

    def extend(self, chain, token_ids, num_tokens):
        original(self, chain, token_ids, num_tokens)
        if len(chain.keys) > 1:
            chain.keys[-1] = self._digest(chain.keys[-2], b"tail")

    return BlockHasher, "extend", extend


@bug("an aborted request goes on in the launched step's result")
def zombie():
    original = Scheduler._finish

    def finish(self, request, reason):
        original(self, request, reason)
        if reason == "abort" and request.num_in_flight:
            request.status = Status.WAITING

    return Scheduler, "_finish", finish


@bug("a lane is given away while a launched step reads it")
def no_lane_quarantine():
    original = Scheduler._leave_lane

    def leave_lane(self, request):
        self._launches.last_step, last_step = 0, self._launches.last_step
        original(self, request)
        self._launches.last_step = last_step

    return Scheduler, "_leave_lane", leave_lane


@bug("blocks on their way are found after the cache was cleared")
def half_cleared():
    return HostTier, "forget_all", lambda self: self._blocks.forget_all()


@bug("running requests take the prefill reserve")
def reserve_taken():
    return PrefillReserve, "keep_from", lambda self, request: 0


@bug("two requests prefill in the reserve")
def reserve_shared():
    return PrefillReserve, "is_open_to", lambda self, request: self._num_pages > 0


@bug("whoever was in the reserve keeps it when it ends")
def reserve_kept():
    original = Scheduler._leave_lane

    def leave_lane(self, request):
        user = self._reserve.user
        original(self, request)
        self._reserve.user = user

    return Scheduler, "_leave_lane", leave_lane


@bug("a request goes back to the reserve with its prompt done")
def reserve_again():
    return PrefillReserve, "is_open_to", lambda self, request: self._num_pages > 0 and self.user is None


@bug("a request stays in the reserve when its prompt is done")
def reserve_never_left():
    return Scheduler, "_leave_reserve", lambda self, decisions: None


@bug("not the youngest gives way")
def wrong_victim():
    return PrefillReserve, "victim", lambda self, running: running[len(running) // 2]


@bug("a prompt is not computed although its log probabilities are wanted")
def cached_logprobs():
    original = BlockManager.open
    return BlockManager, "open", lambda self, *args, use_cache, **kwargs: original(self, *args, **kwargs)


@bug("a request comes back under its launched step")
def early_return():
    original = Scheduler._find_pages

    def find_pages(self, decisions):
        original(self, decisions)
        decisions.preempted = False

    return Scheduler, "_find_pages", find_pages


@bug("a failed store is believed")
def failed_store():
    original = HostTier._end_store
    return HostTier, "_end_store", lambda self, entry, ok: original(self, entry, True)


@bug("a page whose load failed is still found")
def failed_load_found():
    def end_load(self, entry, ok):
        del self._loading[entry.copy.page]
        return ok

    return HostTier, "_end_load", end_load


@bug("who shares a page does not wait for its load")
def impatient():
    def is_loading(self, page):
        return page in self._loading and self._pages.num_holders(page) <= 2

    return HostTier, "is_loading", is_loading


@bug("a load's host block is free")
def load_unheld():
    original = HostTier._load

    def load(self, page, host, key):
        original(self, page, host, key)
        self._blocks.release([host], 0)

    return HostTier, "_load", load


@bug("the last token of a prompt is taken from the cache")
def whole_prompt():
    original = BlockManager._find_prefix

    def find_prefix(self, table, token_ids):
        return original(self, table, [*token_ids, 0])

    return BlockManager, "_find_prefix", find_prefix


@bug("what an unready page holds is saved")
def unready_save():
    original = BlockManager.suspend

    def suspend(self, *args):
        self.is_ready = lambda request_id: True
        try:
            original(self, *args)
        finally:
            del self.is_ready

    return BlockManager, "suspend", suspend
