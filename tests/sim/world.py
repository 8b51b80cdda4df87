"""A world in which the real scheduler, block manager and host tier run without a model, on a `Device`.

It steps like the engine does. After every step it asserts every invariant, and the rules of who gives way and who
leaves which pages alone; at the end, that every output is what it should be and nothing is left over.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import StepResult
from minserve.engine.request import Status
from minserve.engine.scheduler import Scheduler
from minserve.engine.sparse_rules import SparseRules
from minserve.memory.blocks import BlockManager
from minserve.protocol import SamplingParams, Submit
from tests.sim.device import MARK, VOCAB, Device, Link, Own, next_token, prompt_logprob

END_TOKEN = 0


class Text:
    """The prompt of a request and what this world's model says after it, for ever."""

    def __init__(self, prompt):
        self._tokens = list(prompt)

    def upto(self, num_tokens):
        while len(self._tokens) < num_tokens:
            self._tokens.append(next_token(self._tokens))
        return self._tokens[:num_tokens]


def expected_tokens(submit):
    """The whole output of a request that nobody disturbs."""
    params, num_prompt = submit.params, len(submit.prompt_token_ids)
    output = Text(submit.prompt_token_ids).upto(num_prompt + params.max_tokens)[num_prompt:]
    if END_TOKEN in output and not params.ignore_eos:
        return output[: output.index(END_TOKEN) + 1]
    return output


class ChangingLengths:
    """Draft lengths that change from step to step."""

    def __init__(self, most, seed):
        self.most = most
        self._random = random.Random(seed)

    def choose(self, lengths):
        return self._random.randint(0, self.most)

    def note(self, num_drafts, lengths, accepted, seconds):
        assert all(0 <= count <= num_drafts for count in accepted)


@dataclass
class Launched:
    plan: object
    texts: dict
    result: StepResult | None = None


@dataclass
class World:
    """Scheduler, blocks and device, stepped like the engine does it; every invariant is checked after every step."""

    num_pages: int = 16
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    prefix_caching: bool = True
    num_host_blocks: int = 0
    prefill_reserve: int = 0
    chunk_step: int = 1
    num_drafts: int = 0
    run_ahead: int = 0
    late_steps: bool = True
    sparse: SparseRules | None = None
    link: Link = field(default_factory=Link)

    def __post_init__(self):
        self.device = Device(self.num_pages, self.max_num_seqs, self.num_host_blocks, self.link)
        self.blocks = BlockManager(
            self.num_pages,
            secret=b"secret",
            prefix_caching=self.prefix_caching,
            num_host_blocks=self.num_host_blocks,
            copies=self.device,
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=(self.num_pages - self.prefill_reserve) * BLOCK_SIZE,
            vocab_size=VOCAB,
            end_token_ids=(END_TOKEN,),
            prefill_reserve=self.prefill_reserve,
            chunk_step=self.chunk_step,
            drafts=ChangingLengths(self.num_drafts, self.link.seed),
            sparse=self.sparse,
        )
        self.in_flight = deque()
        self.plans = []
        self.submitted = {}
        self.replaced = []
        self.forgotten = set()
        self.before_clear = set()
        self.texts = {}
        self.marks = {"exact": 0}
        self.were_sparse = set()
        self.usage = {}
        self.most_running = self.most_pages = 0
        self.outputs = {}
        self.ends = {}
        self.cached = {}
        self.cached_host = {}

    def submit(self, request_id, prompt, max_tokens=8, salt="", sparse=None, **params):
        submit = Submit(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
            cache_salt=salt,
            sparse=sparse,
        )
        self.scheduler.add(submit)
        if request_id in self.submitted:
            self.replaced.append(self.submitted[request_id])
        self.submitted[request_id] = submit
        self.were_sparse.discard(request_id)
        self.texts[request_id] = Text(submit.prompt_token_ids)
        self.outputs[request_id] = []

    def abort(self, request_id):
        self.scheduler.abort(request_id)

    def clear(self):
        """Forget every cached prefix: what has ended is found by no request that comes after."""
        self.scheduler.clear_prefix_cache()
        self.replaced.clear()
        self.forgotten = set(self.ends)
        self.before_clear = self.submitted.keys() - self.ends.keys()

    def _own(self, request):
        """What its lane should hold."""
        chain = request.chain
        exact_to = None if chain.sparse_from is None else chain.sparse_from * BLOCK_SIZE
        policy = chain.policy if chain.sparse_from is not None else "exact"
        return Own(self.texts[request.id], exact_to, MARK * self.marks.setdefault(policy, len(self.marks)))

    def step(self):
        if not self.in_flight:
            self.device.run_background()
        plan = self._schedule()
        if not plan.is_empty:
            self.device.prepare(plan)
            self.plans.append(plan)
            names = {request.lane: request.id for request in self.scheduler.running}
            self.were_sparse.update(names[demotion.lane] for demotion in plan.demotions)
            texts = {request.lane: self._own(request) for request in self.scheduler.running}
            self.in_flight.append(Launched(plan, texts))
            if not self.late_steps:
                self._catch_up(0)
        deltas = self.scheduler.take_ended()
        while len(self.in_flight) > (0 if plan.is_empty else self.run_ahead):
            self._catch_up(len(self.in_flight) - 1)
            deltas += self.scheduler.commit(self.in_flight.popleft().result)
        self.scheduler.check()
        for delta in deltas:
            self._take(delta)
        return plan

    def _schedule(self):
        reserve = self.scheduler._reserve
        before, user = self._running_sizes(), reserve.user
        sparse = {request for request in before if request.policy is not None}
        prompt_done = user is not None and user.is_decoding and not user.wants_no_more
        plan = self.scheduler.schedule()
        self.scheduler.check()
        after = self._running_sizes()
        in_reserve = {user, reserve.user}
        gave_way = [request for request in before if request.status is Status.WAITING]
        if self.link.failure_rate == 0:  # else they may wait because a load failed
            stayed = before.keys() & after.keys() - in_reserve
            if sparse.issuperset(gave_way) and not self.blocks.num_host_available:
                stayed &= sparse  # it was for a host block: resident requests have none to give
            oldest = max((request.arrival for request in stayed), default=0)
            assert all(request.arrival > oldest for request in gave_way), "not the youngest gave way"
        if in_reserve == {None} and any(size > before.get(request, 0) for request, size in after.items()):
            assert self.blocks.num_available >= self.prefill_reserve, "a page of the reserve was taken"
        becomes_sparse = user is not None and self.scheduler._sparsity.takes_part(user)
        assert reserve.user is None or reserve.user.num_output_tokens == 0 or becomes_sparse, (
            "the reserve is for prompts"
        )
        assert not prompt_done or reserve.user is not user or becomes_sparse, "a request stays in the reserve"
        self.most_running = max(self.most_running, len(after))
        self.most_pages = max(self.most_pages, self.blocks.num_held)
        return plan

    def _running_sizes(self):
        """How many pages each running request has."""
        return {request: len(self.blocks.pages(request.id)) for request in self.scheduler.running}

    def _catch_up(self, num_left):
        """Let the device run all launched steps but the num_left newest."""
        for launched in list(self.in_flight)[: len(self.in_flight) - num_left]:
            if launched.result is None:
                launched.result = self.device.run(launched.plan, launched.texts)

    def _take(self, delta):
        assert delta.request_id not in self.ends, f"{delta.request_id} spoke after its end"
        self.outputs[delta.request_id] += delta.token_ids
        self._check_prompt_logprobs(delta)
        if delta.cached_tokens is not None:
            self._check_tenant(delta.request_id, delta.cached_tokens)
            self.cached[delta.request_id] = delta.cached_tokens
            self.cached_host[delta.request_id] = delta.cached_host_tokens
        if delta.finish_reason is not None:
            assert (delta.sparse is not None) == (delta.request_id in self.were_sparse), "usage of what was not sparse"
            self.ends[delta.request_id] = delta.finish_reason
            self.usage[delta.request_id] = delta.sparse

    def _check_prompt_logprobs(self, delta):
        """The first delta has them all, each of its own position."""
        submit = self.submitted[delta.request_id]
        wanted = submit.params.prompt_logprobs is not None and delta.request_id not in self.cached
        if wanted and delta.finish_reason != "abort":
            tokens = submit.prompt_token_ids
            assert delta.prompt_logprobs == [None] + [prompt_logprob(at, tokens[at]) for at in range(1, len(tokens))]
        else:
            assert delta.prompt_logprobs is None

    def _check_tenant(self, request_id, num_cached):
        """Cached tokens come from the same prefix of a request with the same salt that was not forgotten."""
        own = self.submitted[request_id]
        tokens = own.prompt_token_ids[:num_cached]
        forgotten = {request_id} | (set() if request_id in self.before_clear else self.forgotten)
        others = self.replaced + [other for name, other in self.submitted.items() if name not in forgotten]
        assert not num_cached or any(
            other.cache_salt == own.cache_salt and Text(other.prompt_token_ids).upto(num_cached) == tokens
            for other in others
        ), f"{request_id} was given forgotten blocks, or another tenant's"

    @property
    def has_work(self):
        return self.scheduler.has_work or bool(self.in_flight)

    def run(self, max_steps=5_000):
        """Step until everybody has ended; then every output is what it should be and everything is free."""
        for _ in range(max_steps):
            if not self.has_work:
                break
            self.step()
        assert not self.has_work, f"not done after {max_steps} steps"
        self.verify()

    def verify(self):
        assert self.ends.keys() == self.submitted.keys(), "a request was not told its end"
        for request_id, submit in self.submitted.items():
            expected = expected_tokens(submit)
            output = self.outputs[request_id]
            if self.ends[request_id] == "abort":
                assert output == expected[: len(output)]
            else:
                assert output == expected
                stopped = expected[-1] == END_TOKEN and not submit.params.ignore_eos
                assert self.ends[request_id] == ("stop" if stopped else "length")
        for _ in range(self.link.max_delay + 1):
            self.step()
        assert self.blocks.num_copies == 0
        kept = self.blocks._tables.keys() | self.blocks._refs.suspended.keys()
        assert not kept, "something is kept of a request that has ended"
        assert self.blocks.num_available == self.num_pages, "pages are still held"
        assert self.blocks.num_host_held == 0, "host blocks are still held"
        assert self.scheduler.stats().num_running == self.scheduler.stats().num_waiting == 0
