"""Who is sparse, who is to become so, and what plans say of it.

Owns: these states, each sparse request's allowance, and the counts of what working sets did. Imports no torch.
Does not know: the queue, or who gives way; the scheduler asks it before anybody does.

A resident request becomes sparse in three steps. It is wanted: because it is long, or because others need its pages.
It decodes once more, with its queries kept, since these say which blocks it will hold. And when all of its rows have
ended and all of its full blocks are durable, a plan demotes it, and its next row is that of a sparse lane.

A sparse request's block leaves the ring in the background of the step whose first row is two blocks further, and may
be read from its host block from then on. So a request waits while a step might get there, by what its launched
steps can give at most, before that block is durable.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from minserve.config import BLOCK_SIZE
from minserve.engine.allowance import Allowance, LinkBudget, refills
from minserve.engine.plan import Demotion, Fetched
from minserve.engine.request import Request
from minserve.engine.reserve import PrefillReserve
from minserve.engine.sparse_rules import SparseRules, Terms
from minserve.errors import RequestError
from minserve.memory.blocks import BlockManager
from minserve.protocol import SparseParams, SparseUsage, Stats

WAIT_FOR = 2
"""With so many blocks on their way to host blocks a request waits for them in order to become sparse; with more it goes
on meanwhile. A sparse one would have to wait with as many."""


@dataclass(slots=True)
class _State:
    """wanted: it is to become sparse; urgent: others wait for its pages, so that it waits for its copies.
    has_queries: its last step has kept them. from_token: see `SparseUsage`; -1: it never was sparse. num_full: how many
    full blocks it had when it last became so."""

    terms: Terms
    allowance: Allowance
    wanted: bool = False
    urgent: bool = False
    has_queries: bool = False
    from_token: int = -1
    num_full: int = 0
    num_steps: int = 0
    num_retries: int = 0
    fetched: Fetched = field(default_factory=lambda: Fetched(0, 0, 0, 0, 0))


class Sparsity:
    """rules: None: nobody is ever sparse. stats: its counters of working sets are kept here."""

    def __init__(self, rules: SparseRules | None, blocks: BlockManager, reserve: PrefillReserve, stats: Stats) -> None:
        self._rules = rules if blocks.writes_through else None
        self._num_slots = rules.num_slots if rules is not None else 0
        self._blocks = blocks
        self._reserve = reserve
        self._stats = stats
        self._states: dict[Request, _State] = {}
        self._budget = LinkBudget(rules.link_bytes_s / rules.head_block_bytes if rules and rules.link_bytes_s else None)
        self._is_starved = False

    # ---- requests come and go ----

    def add(self, request: Request, params: SparseParams | None) -> None:
        """Raises RequestError for what the server cannot do."""
        if self._rules is None and params is not None and params.mode == "always":
            raise RequestError(
                "no request is ever sparse on this server (see --sparse and --host-kv)", param="sparse.mode"
            )
        terms = self._rules.terms(params) if self._rules is not None else None
        if terms is not None:
            self._states[request] = _State(terms, Allowance(terms.allowance, terms.fixed))

    def remove(self, request: Request) -> None:
        """It has ended: its usage is in the request."""
        state = self._states.pop(request, None)
        if state is None or state.from_token < 0 or self._rules is None:
            return
        fetched = state.fetched
        request.sparse_usage = SparseUsage(
            from_token=state.from_token,
            steps=state.num_steps,
            retries=state.num_retries,
            hits=fetched.hits,
            misses=fetched.misses,
            cut_misses=fetched.cut,
            surprises=fetched.surprises,
            asked=fetched.asked,
            bytes_fetched=(fetched.misses - fetched.cut) * self._rules.head_block_bytes,
        )

    def leave(self, request: Request) -> None:
        """It leaves its lane: if it comes back, it is resident."""
        request.policy = None
        if (state := self._states.get(request)) is not None:
            state.wanted = state.urgent = state.has_queries = False

    def key(self, request: Request) -> bytes:
        """Of the policy, if a request has it from its first decode on: blocks that were computed under it serve this
        request as well."""
        state = self._states.get(request)
        if state is None or state.terms.above is None or len(request.token_ids) + 1 <= state.terms.above:
            return b""
        return state.terms.key

    def has_host_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether there are host blocks for all of a waiting request, if it cannot do without, beside what those that
        run will want next."""
        if not (self.key(request) and self._fits_host(request)):
            return True
        others = [r for r in running if self.key(r) and self._fits_host(r)]
        wanted = sum(_num_blocks(r) - self._blocks.num_durable(r.id) for r in others)
        return self._blocks.num_host_available + self._blocks.num_kept(request.id) >= _num_blocks(request) + wanted

    def _fits_host(self, request: Request) -> bool:
        """Whether all host blocks together would do. Who is longer is resident, and need not wait for host blocks."""
        return _num_blocks(request) <= self._blocks.num_host_blocks

    def takes_part(self, request: Request) -> bool:
        """Whether it is sparse, or may be in its next step."""
        return request.policy is not None or (request in self._states and self._states[request].wanted)

    # ---- before a step ----

    def sits_out(self, request: Request) -> bool:
        """Whether a request that decodes has to wait, as a sparse one or in order to become one."""
        state = self._states.get(request)
        if state is None:
            return False
        if request.policy is not None:
            return self._waits_for_copies(request)
        if state.terms.above is not None and request.num_tokens > state.terms.above and self._fits_host(request):
            state.wanted = True
        if not (state.wanted and state.has_queries):
            return False
        if not self._can_be_demoted(request, state):
            return False
        num_missing = self._num_full(request) - self._blocks.num_durable(request.id)
        waits = state.urgent or num_missing <= WAIT_FOR
        return waits and (num_missing > 0 or not self._is_at_rest(request))

    def _is_at_rest(self, request: Request) -> bool:
        """None of its rows is under way."""
        return request.num_in_flight == 0

    def _waits_for_copies(self, request: Request) -> bool:
        num_leaving = self._num_full(request) - 1
        has_room = self._blocks.secure(request.id, insist=True)
        waits = self._blocks.num_durable(request.id) < num_leaving
        self._is_starved |= waits and not has_room
        return waits

    def _num_full(self, request: Request) -> int:
        """How many blocks may be full when the launched steps have ended."""
        return (request.num_tokens + request.num_drafts_in_flight - 1) // BLOCK_SIZE

    def take_starved(self) -> bool:
        """Whether since the last call some sparse request waits for a host block, and none is coming."""
        is_starved, self._is_starved = self._is_starved and not self._blocks.num_host_returning, False
        return is_starved

    def _can_be_demoted(self, request: Request, state: _State) -> bool:
        """Whether it would be worth to wait for that. Gives it up if not, unless it has to become sparse some day."""
        returned = self._num_returned(request)
        if returned is None or (state.urgent and returned <= 0) or not self._blocks.secure(request.id):
            state.wanted = state.urgent = state.has_queries = False
            return False
        return True

    def _num_returned(self, request: Request) -> int | None:
        """Pages that it would give back, on balance; None: it cannot become sparse now."""
        keep = self._reserve.keep_from(request)
        return self._blocks.num_returned(request.id, request.num_tokens, self._num_slots, keep)

    def demote(self, request: Request, step: int) -> Demotion | None:
        """If this is the step in which a request becomes sparse, it does. None: it is what it was."""
        state = self._states.get(request)
        if state is None or not state.has_queries or request.policy is not None or not self._is_at_rest(request):
            return None
        num_tokens = len(request.token_ids)
        if self._blocks.num_durable(request.id) < (num_tokens - 1) // BLOCK_SIZE:
            return None
        if not self._can_be_demoted(request, state):
            return None
        keep = self._reserve.keep_from(request)
        places = self._blocks.demote(request.id, num_tokens, self._num_slots, state.terms.key, step=step, keep=keep)
        if places is None:
            return None
        request.policy = state.terms.policy
        state.wanted = state.urgent = state.has_queries = False
        state.from_token = num_tokens - 1 if state.from_token < 0 else state.from_token
        state.num_full = (num_tokens - 1) // BLOCK_SIZE
        self._stats.num_demotions += 1
        return Demotion(
            lane=request.lane,
            policy=state.terms.policy,
            num_tokens=num_tokens,
            pages=places.pages,
            slot_pages=places.slot_pages,
            slot_blocks=places.slot_blocks,
            ring_pages=places.ring_pages,
            ring_copies=places.ring_copies,
            host_blocks=places.host_blocks,
        )

    # ---- under pressure ----

    def relieve(self, running: Sequence[Request], planned: Container[Request], asker: Request | None = None) -> bool:
        """Somebody finds no page. Whether some request will soon give pages back by becoming sparse: one that is about
        to, or else the longest that can.

        asker: who needs the page for its next step, if that is one of them; planned: who has, or may yet find, its own.
        """
        able = [r for r in running if self._is_able(r, planned) and (r is not asker or self._states[r].has_queries)]
        about_to = [request for request in able if self._states[request].wanted]
        for request in about_to[:1] or sorted(able, key=lambda request: request.num_tokens)[-1:]:
            self._states[request].wanted = self._states[request].urgent = True
        if not able and asker is not None and self._is_able(asker, planned):
            self._states[asker].wanted = True  # it needs a page once more; then it will give some back
        return bool(able)

    def _is_able(self, request: Request, planned: Container[Request]) -> bool:
        """Whether a request would give pages back by becoming sparse, and nothing is in its way."""
        state = self._states.get(request)
        if state is None or request.policy is not None or request is self._reserve.user:
            return False
        if not (request.is_decoding and (state.has_queries or request in planned)) or request.wants_no_more:
            return False
        return (
            self._blocks.is_ready(request.id)
            and (self._num_returned(request) or 0) > 0
            and self._blocks.num_unstored(request.id) <= self._blocks.num_host_available
        )

    def leaves_reserve(self, request: Request) -> bool:
        """Whether the user of the prefill reserve, whose prompt is done, will leave it by becoming sparse."""
        state = self._states.get(request)
        if state is None or request.policy is not None:
            return False
        returned = self._num_returned(request) or 0
        if not self._reserve.can_be_left(returned) or not self._blocks.secure(request.id):
            return False
        state.wanted = state.urgent = True
        return True

    # ---- a step is launched, and its result comes ----

    def num_drafts(self, running: Sequence[Request]) -> int:
        """How many drafts the next step of these needs at least: a row behind those that a lane verifies."""
        taking_part = [request for request in running if self.takes_part(request)] if self._states else []
        policies = [request.policy or self._states[request].terms.policy for request in taking_part]
        return max((policy.num_verified + policy.looks_ahead for policy in policies), default=0)

    def words(self, decoding: Sequence[Request]) -> dict[str, Any]:
        """What a plan says of the working sets of those that it decodes."""
        taking_part = [request for request in decoding if self.takes_part(request)] if self._states else []
        if not taking_part:
            return {}
        for request in taking_part:
            self._states[request].has_queries = request.policy is None
        sparse = [request for request in taking_part if request.policy is not None]
        stored = [(request, *entry) for request in sparse for entry in self._blocks.take_stored(request.id)]
        for request, block, _ in stored:
            if self._rules is not None and block >= self._states[request].num_full:
                self._stats.bytes_stored += self._rules.block_bytes
        most = self._budget.most(self._rules.num_layers) if self._rules is not None else None
        shares = refills([self._states[request].allowance for request in sparse], most)
        return {
            "keeps_queries": True,
            "stored": [(request.lane, block, host) for request, block, host in stored],
            "refills": [(request.lane, *share) for request, share in zip(sparse, shares, strict=True)],
        }

    def note_step(self, is_sparse: bool, seconds: float | None) -> None:
        """What a step took, if that tells anything; is_sparse: somebody was so in it."""
        if is_sparse and seconds is not None:
            self._budget.note(seconds)

    def note(self, request: Request, fetched: Fetched, ran_again: bool) -> None:
        """What a step did for a request that was sparse in it."""
        stats, missed = self._stats, fetched.cut + fetched.surprises
        stats.sparse_steps += 1
        stats.sparse_retries += ran_again
        stats.sparse_hits += fetched.hits
        stats.sparse_misses += fetched.misses
        stats.sparse_cut_misses += fetched.cut
        stats.sparse_surprises += fetched.surprises
        stats.sparse_asked += fetched.asked
        if self._rules is not None:
            stats.bytes_fetched += (fetched.misses - fetched.cut) * self._rules.head_block_bytes
        if (state := self._states.get(request)) is not None:
            state.num_steps += 1
            state.num_retries += ran_again
            state.fetched = Fetched(*map(sum, zip(state.fetched, fetched, strict=True)))
            state.allowance.note(missed)


def _num_blocks(request: Request) -> int:
    """Blocks of a request, with the one that it will write next."""
    return len(request.token_ids) // BLOCK_SIZE + 1
