"""Who computes what in the next step, and what its result means for each request.

Owns: every Request, the queues (`Roster`), and the token budget. Decides admission, preemption and stops.
Does not know: tensors, devices, text. Asks `BlockManager` for pages. Imports no torch.

Two rules keep everybody moving. Requests are served in the order of their arrival, and when pages run out the
youngest running request gives way; so the oldest always advances. And decodes come before prefill chunks, which take
what is left of the budget; so a long prompt never stops the others' streams.

Steps may be planned before the results of earlier ones are known: `schedule` counts a token as computed when its step
is launched, and `commit` says later which token it was. A request that turns out to have ended meanwhile has a row
too many in the launched step; what that row yields is dropped.

A launched step has a background pass if some request is sparse (`Sparsity`), which ends later than its result is there:
with the result of the next step; or when no step is under way, for `schedule` is called then only when it has ended.
"""

from collections.abc import Sequence

from minserve.config import BLOCK_SIZE
from minserve.engine.decisions import Decisions, Launched
from minserve.engine.launches import Launches
from minserve.engine.limits import refuse_impossible
from minserve.engine.plan import LaneSetup, StepPlan, StepResult
from minserve.engine.request import Request, Status
from minserve.engine.reserve import PrefillReserve
from minserve.engine.roster import Roster
from minserve.engine.sparse_rules import SparseRules
from minserve.engine.sparsity import Sparsity
from minserve.errors import RequestError
from minserve.grammar import BYTES, Grammars
from minserve.memory.blocks import BlockManager
from minserve.memory.tables import Cached
from minserve.protocol import Delta, FinishReason, Stats, Submit, TokenLogprobs
from minserve.spec.lengths import DraftLengths, FixedLength


class Scheduler:
    """drafts: how many drafts are proposed, and verified one step later. grammars: compiles those of requests.

    max_num_batched_tokens: of prompts, in a step; decodes come on top, so that chunks are as long beside them as alone.
    chunk_step: a prompt's chunk that is not its last ends at a multiple of it, where that costs little of the budget.
    blocks must have pages for max_model_len tokens beside the prefill_reserve (see `PrefillReserve`), so that every
    request that is accepted can finish alone. sparse: who may become sparse; None: nobody. It takes a host tier.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        end_token_ids: tuple[int, ...] = (),
        prefill_reserve: int = 0,
        chunk_step: int = 1,
        drafts: DraftLengths | None = None,
        grammars: Grammars | None = None,
        sparse: SparseRules | None = None,
    ) -> None:
        drafts = drafts or FixedLength(0)
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._chunk_step = chunk_step
        self._end_token_ids = end_token_ids
        self._reserve = PrefillReserve(blocks, prefill_reserve)
        self._roster = Roster(max_num_seqs)
        self._counters = Stats()
        self._sparsity = Sparsity(sparse, blocks, self._reserve, self._counters)
        self._grammars = grammars or Grammars(lambda: BYTES)
        self._launches = Launches(drafts, self._grammars, self._sparsity)
        self._num_arrived = 0
        self._ended: list[Delta] = []

    # ---- requests come and go ----

    def add(self, submit: Submit) -> None:
        """Queue a request. Raises RequestError if it can never be served."""
        if submit.request_id in self._roster.by_id:
            raise RequestError(f"request id {submit.request_id!r} is in use", param="request_id")
        refuse_impossible(submit, self._max_model_len, self._vocab_size)
        matcher = None if submit.grammar is None else self._grammars.matcher(submit.grammar)
        request = Request.from_submit(submit, self._num_arrived + 1, self._end_token_ids, matcher)
        self._sparsity.add(request, submit.sparse)
        self._num_arrived += 1
        self._roster.add(request)

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; one that has ended already, or never was, is left alone."""
        request = self._roster.by_id.get(request_id)
        if request is not None:
            self._finish(request, "abort")
            self._ended.append(request.next_delta())

    @property
    def has_work(self) -> bool:
        """Whether any request has not been told its end."""
        return bool(self._roster.by_id or self._ended)

    @property
    def running(self) -> Sequence[Request]:
        """Requests with a lane, in order of arrival."""
        return self._roster.running

    @property
    def request_ids(self) -> list[str]:
        """Requests that have not ended, in order of arrival."""
        return list(self._roster.by_id)

    # ---- plan ----

    def schedule(self) -> StepPlan:
        """The next step; empty if nobody can advance. Takes lanes and pages, and counts its tokens as computed."""
        for request_id in self._blocks.poll_copies():
            self._start_over(self._roster.by_id[request_id])
        if self._launches.is_idle:
            self._blocks.end_background(self._launches.last_step)
            self._roster.end_background(self._launches.last_step)
        decisions = Decisions(num_drafts=self._launches.num_proposed)
        self._leave_reserve(decisions)
        self._share_budget(decisions)
        self._find_host_block(decisions)
        self._find_pages(decisions)
        if not decisions.preempted:  # who gave way comes back when the step that is under way has been committed
            self._admit(decisions)
        setups = [self._set_up(r, decisions) for r in self.running if r in decisions.counts and not r.is_set_up]
        return self._launches.launch(self.running, decisions, setups)

    def _share_budget(self, decisions: Decisions) -> None:
        """Tokens for each running request: a decode's own, and chunks of prompts in order of arrival."""
        budget = self._max_num_batched_tokens
        for request in self.running:
            if request.wants_no_more or request.awaits_token or not self._blocks.is_ready(request.id):
                continue
            if request.is_decoding:
                if not self._sparsity.sits_out(request):
                    decisions.counts[request] = 1
            elif count := request.num_next(budget, self._chunk_step):
                decisions.counts[request] = count
                budget -= count

    def _find_host_block(self, decisions: Decisions) -> None:
        """If a sparse request cannot go on for want of a host block, the youngest sparse one gives way."""
        if self._sparsity.take_starved():
            victim = [request for request in self.running if request.policy is not None][-1]
            self._preempt(victim, decisions)

    def _find_pages(self, decisions: Decisions) -> None:
        """Give the planned tokens pages, the oldest request first."""
        for request in [request for request in self.running if request in decisions.counts]:
            if request not in decisions.counts:
                continue  # it has given way
            if demotion := self._sparsity.demote(request, self._launches.next_step):
                decisions.demotions.append(demotion)
                continue
            first = len(self._blocks.pages(request.id))
            pages = self._grow(request, decisions)
            if pages and request.is_set_up:
                decisions.new_pages.append((request.lane, first, tuple(pages)))

    def _grow(self, request: Request, decisions: Decisions) -> list[int] | None:
        """Pages for the planned tokens of a request. If there are none, some request becomes sparse, or the youngest
        running request gives way."""
        while True:
            reach = request.reach(decisions.counts[request], decisions.num_drafts)
            pages = self._blocks.grow(request.id, reach, keep=self._reserve.keep_from(request))
            if pages is not None:
                return pages
            are_returning = self._blocks.num_returning or decisions.demotions
            if are_returning or self._sparsity.relieve(self.running, decisions.counts, request):
                del decisions.counts[request]  # pages are coming back: sit this step out rather than evict anyone
                return None
            victim = self._reserve.victim(self.running)
            self._preempt(victim, decisions)
            if victim is request:
                return None

    def _admit(self, decisions: Decisions) -> None:
        """Start waiting requests, in order of arrival, while lanes, pages and budget last."""
        taken = sum(count for request, count in decisions.counts.items() if not request.is_decoding)
        budget = self._max_num_batched_tokens - taken
        while self._roster.waiting and self._roster.has_lane and budget > 0:
            request = self._roster.waiting[0]
            assert not request.num_in_flight, "a request comes back before its launched step"
            if self.running and not self._sparsity.has_host_room(request, self.running):
                return
            cached = self._open(request, keep=self._reserve.keep_from(request))
            if cached is None and self._reserve.is_open_to(request):
                cached = self._open(request, keep=0)
                self._reserve.user = request if cached is not None else None
            if cached is None:
                if not (self._blocks.num_returning or self._blocks.awaits_saved(request.id)):
                    self._sparsity.relieve(self.running, decisions.counts)
                return
            self._roster.start(request)
            request.num_computed, request.found = cached.num_tokens, cached
            if self._blocks.is_ready(request.id):
                decisions.counts[request] = request.num_next(budget, self._chunk_step)
                budget -= decisions.counts[request]
                # Nothing had to be loaded, so if it decodes, its last token begins a block, where drafts find room too.
                reach = request.reach(decisions.counts[request], decisions.num_drafts)
                assert reach <= len(self._blocks.pages(request.id)) * BLOCK_SIZE

    def _open(self, request: Request, keep: int) -> Cached | None:
        return self._blocks.open(
            request.id,
            request.token_ids,
            request.chain,
            use_cache=not request.awaits_prompt_logprobs,
            keep=keep,
            policy=self._sparsity.key(request),
        )

    def _leave_reserve(self, decisions: Decisions) -> None:
        """A request whose prompt is done moves among the others. If that is too much, and it would not be if it were
        sparse, it stays until it is; else the youngest gives way."""
        request = self._reserve.user
        if request is None or not request.is_decoding or request.wants_no_more:
            return
        while request in self.running and not self._reserve.can_be_left():
            if self._sparsity.leaves_reserve(request):
                return
            self._preempt(self.running[-1], decisions)
        self._reserve.user = None

    def _set_up(self, request: Request, decisions: Decisions) -> LaneSetup:
        """The first plan that computes anything for a request in its lane brings the lane's state and page table."""
        request.is_set_up = True
        decisions.new_pages.append((request.lane, 0, tuple(self._blocks.pages(request.id))))
        if request.cached is None:
            request.cached = request.found
            self._counters.prompt_tokens += request.num_prompt_tokens
            self._counters.prefix_queries_tokens += request.num_prompt_tokens
            self._counters.prefix_hits_tokens += request.cached.num_tokens
        return request.lane_setup()

    # ---- results ----

    def commit(self, result: StepResult) -> list[Delta]:
        """Take in what the oldest launched step yielded: tokens, full blocks, ends. What only it held back is free."""
        self._blocks.end_step(result.step)
        self._roster.end_step(result.step)
        self._counters.num_steps += 1
        deltas: list[Delta] = []
        accepted: list[tuple[Launched, int]] = []
        for yielded in self._launches.take(result):
            entry, request, token_ids = yielded.entry, yielded.entry.request, yielded.token_ids
            if entry.is_sparse:
                self._sparsity.note(request, yielded.fetched, yielded.runs_again)
            if entry.chunk is not None:
                request.note_prompt_logprobs(entry.chunk, yielded.prompt_logprobs)
            if request.status is Status.FINISHED:
                continue  # it ended while this step was in flight
            if yielded.runs_again:
                self._launches.run_again(entry)
                continue
            if token_ids and request.status is Status.RUNNING:
                request.drafts = yielded.drafts
            if token_ids:
                deltas.append(self._take_tokens(entry, token_ids, yielded.logprobs))
            elif request.status is Status.RUNNING:
                self._blocks.publish(request.id, request.token_ids, entry.num_computed)
            if entry.chunk is None:
                accepted.append((entry, len(token_ids) - 1))
        self._sparsity.note_step(any(entry.is_sparse for entry, _ in accepted), result.seconds)
        self._launches.note_accepted(accepted, result.seconds, self._counters)
        return deltas

    def take_ended(self) -> list[Delta]:
        """The last deltas of requests that ended outside of a step's result."""
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> Stats:
        """Counters since the start, and gauges as of now."""
        counters, blocks = self._counters, self._blocks
        counters.num_running, counters.num_waiting = len(self.running), len(self._roster.waiting)
        counters.num_sparse = sum(request.policy is not None for request in self.running)
        counters.num_pages, counters.num_pages_used = blocks.num_pages, blocks.num_held
        counters.num_host_blocks, counters.num_host_blocks_used = blocks.num_host_blocks, blocks.num_host_used
        return counters

    def _take_tokens(
        self, entry: Launched, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> Delta:
        """A request's next tokens, as far as it wants any: accepted drafts may go beyond its end."""
        request = entry.request
        request.num_in_flight -= 1
        request.num_drafts_in_flight -= entry.num_drafts
        request.num_drafted += entry.num_drafts
        count, reason = request.take(token_ids)
        request.num_accepted += min(count, len(token_ids) - 1)  # not those behind its end
        self._counters.generation_tokens += count
        if request.status is Status.RUNNING:  # else it has lost the pages that this step wrote
            request.num_computed += len(token_ids) - 1
            self._blocks.publish(request.id, request.token_ids, len(request.token_ids) - 1)
        if reason is not None:
            self._finish(request, reason)
        delta = request.next_delta()
        delta.token_ids = list(token_ids[:count])
        delta.logprobs = None if logprobs is None else list(logprobs[:count])
        return delta

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._vacate(request)
        else:
            self._blocks.forget(request.id)
        self._roster.end(request)
        self._sparsity.remove(request)
        request.finish_reason = reason

    def _preempt(self, request: Request, decisions: Decisions) -> None:
        """Take a request's pages and lane. What it has computed is kept in host blocks, as far as these reach."""
        decisions.counts.pop(request, None)
        decisions.preempted = True
        self._blocks.suspend(request.id, request.num_computed, self._launches.last_step)
        self._leave_lane(request)
        self._roster.requeue(request)
        self._counters.num_preemptions += 1

    def _start_over(self, request: Request) -> None:
        """What was found for a request could not be loaded: it asks again, and what failed is not found any more."""
        self._vacate(request)
        self._roster.requeue(request)

    def _vacate(self, request: Request) -> None:
        self._blocks.close(request.id, self._launches.last_step)
        self._leave_lane(request)

    def _leave_lane(self, request: Request) -> None:
        if self._reserve.user is request:
            self._reserve.user = None
        self._roster.leave_lane(request, self._launches.last_step)
        self._sparsity.leave(request)

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._blocks.clear_cache()

    def check(self) -> None:
        """Assert every invariant of queues, lanes and blocks."""
        self._blocks.check()
        self._roster.check()
        for request in self.running:
            pages = self._blocks.pages(request.id)
            assert request.policy is not None or len(pages) * BLOCK_SIZE >= request.num_computed
