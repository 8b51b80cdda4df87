"""Planted bugs of sparse requests: what is told too early, given away too early, or taken for what it is not."""

from dataclasses import replace

from minserve.engine.launches import Launches
from minserve.engine.sparsity import Sparsity
from minserve.memory.blocks import BlockManager
from minserve.memory.hashing import KeyChain
from minserve.memory.host_refs import HostRefs
from minserve.memory.host_tier import HostTier
from minserve.memory.slots import SlotMaker
from tests.sim.bugs import bug


@bug("a sparse request's block is stored with a token that has no KV yet")
def early_stored():
    original = BlockManager.publish

    def publish(self, request_id, token_ids, num_tokens):
        more = self._tables[request_id].is_sparse
        original(self, request_id, token_ids, min(len(token_ids), num_tokens + more))

    return BlockManager, "publish", publish


@bug("a block leaves the ring before it is durable")
def no_gate():
    original = Sparsity._waits_for_copies
    return Sparsity, "_waits_for_copies", lambda self, request: original(self, request) and False


@bug("drafts under way are forgotten by who waits for copies")
def short_gate():
    def num_full(self, request):
        return (request.num_tokens - 1) // 16

    return Sparsity, "_num_full", num_full


@bug("a request becomes sparse with rows under way")
def rows_under_way():
    return Sparsity, "_is_at_rest", lambda self, request: True


@bug("a request becomes sparse with copies in flight")
def copies_under_way():
    original = HostRefs.num_durable

    def num_durable(self, table):
        if not table.is_sparse and -1 not in table.hosts:
            table.num_durable = table.num_published
        return original(self, table)

    return HostRefs, "num_durable", num_durable


@bug("a host block is read before it is durable")
def not_durable():
    return HostTier, "is_complete", lambda self, host: host not in self._failed


@bug("a request becomes sparse without queries")
def no_queries():
    original = Sparsity.demote

    def demote(self, request, step):
        if request in self._states and self._states[request].wanted:
            self._states[request].has_queries = True
        return original(self, request, step)

    return Sparsity, "demote", demote


@bug("a row that runs again counts as computed")
def retry_computed():
    original = Launches.run_again

    def run_again(self, entry):
        original(self, entry)
        entry.request.num_computed += 1

    return Launches, "run_again", run_again


@bug("a row that has to run again yields a token")
def retry_accepts():
    original = Launches.take

    def take(self, result):
        for yielded in original(self, result):
            yield yielded._replace(token_ids=[1]) if yielded.runs_again else yielded

    return Launches, "take", take


@bug("what was saved goes as far as a row that has to run again")
def resumed_too_far():
    original = BlockManager.open

    def open_(self, request_id, token_ids, *args, **kwargs):
        cached = original(self, request_id, token_ids, *args, **kwargs)
        saved = cached is not None and cached.num_tokens == len(token_ids) - 1
        return type(cached)(cached.device, cached.host + 1) if saved else cached

    return BlockManager, "open", open_


@bug("the policy is missing in the hash")
def no_policy():
    return KeyChain, "policy_of", lambda self, block: b""


@bug("the block in which a request became sparse is taken for exact")
def late_policy():
    original = KeyChain.policy_of
    return KeyChain, "policy_of", lambda self, block: original(self, block - 1)


@bug("a shared page becomes a slot")
def shared_slot():
    return SlotMaker, "is_own", lambda self, table, copies: [True] * len(table.pages)


@bug("a slot's page is found by the key of what it held")
def slot_found():
    original = BlockManager.demote

    def demote(self, *args, **kwargs):
        self._pool.unpublish = lambda page: None
        try:
            return original(self, *args, **kwargs)
        finally:
            del self._pool.unpublish

    return BlockManager, "demote", demote


@bug("pages are reused before the step that makes their request sparse has ended")
def early_release():
    original = BlockManager.demote
    return BlockManager, "demote", lambda self, *args, **kwargs: original(self, *args, **kwargs | {"step": 0})


@bug("a background pass is taken to end with its step's result")
def no_background():
    original = BlockManager.end_step

    def end_step(self, step):
        original(self, step)
        self.end_background(step)

    return BlockManager, "end_step", end_step


@bug("the ring is not copied from pages that others hold")
def ring_not_copied():
    original = BlockManager.demote

    def demote(self, *args, **kwargs):
        places = original(self, *args, **kwargs)
        return places and replace(places, ring_copies=())

    return BlockManager, "demote", demote


@bug("a sparse request keeps what it is when it comes back")
def still_sparse():
    original = Sparsity.leave

    def leave(self, request):
        policy = request.policy
        original(self, request)
        request.policy = policy

    return Sparsity, "leave", leave


@bug("an unfinished block of a sparse request is saved from the wrong page")
def wrong_page():
    original = BlockManager.suspend

    def suspend(self, request_id, num_computed, last_step):
        table = self._tables[request_id]
        if table.is_sparse:
            table.pages[-3:] = [table.pages[-1], *table.pages[-3:-1]]
        original(self, request_id, num_computed, last_step)

    return BlockManager, "suspend", suspend
