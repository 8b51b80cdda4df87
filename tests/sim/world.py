"""A world in which the real scheduler and block manager run without a model.

`TagRunner` takes the place of the runner and of the device: instead of keys and values, a page holds the tokens that
were written into it, and the "model" is a hash of every token that it can read through the page table. A page that was
freed too early, shared wrongly or never written therefore changes the tokens that come out, and `expected_tokens` says
what they should have been.
"""

import hashlib
from collections import deque

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import StepResult
from minserve.engine.scheduler import Scheduler
from minserve.memory.blocks import BlockManager
from minserve.protocol import SamplingParams, Submit

VOCAB = 50
END_TOKEN = 0


def next_token(tokens):
    """What the model of this world says after `tokens`."""
    return hashlib.blake2b(bytes(tokens), digest_size=4).digest()[0] % VOCAB


def expected_tokens(submit):
    """The whole output of a request that nobody disturbs."""
    tokens = list(submit.prompt_token_ids)
    output = []
    params = submit.params
    while len(output) < params.max_tokens:
        output.append(next_token(tokens + output))
        if output[-1] == END_TOKEN and not params.ignore_eos:
            break
    return output


class TagRunner:
    """The device: page contents, the lanes' page tables and last tokens."""

    def __init__(self, num_pages, num_lanes):
        self.pages = [[None] * BLOCK_SIZE for _ in range(num_pages)]
        self.tables = [[] for _ in range(num_lanes)]
        self.last_token = [None] * num_lanes

    def run(self, plan):
        for setup in plan.setups:
            self.tables[setup.lane] = []
            self.last_token[setup.lane] = setup.last_token
        for lane, first, pages in plan.new_pages:
            assert first == len(self.tables[lane]), "pages were added to a table with a gap"
            self.tables[lane].extend(pages)
        tokens = []
        for chunk in plan.chunks:
            for offset, token in enumerate(chunk.token_ids):
                self._write(chunk.lane, chunk.start + offset, token)
            if chunk.samples:
                tokens.append((chunk.lane, self._read(chunk.lane, chunk.start + len(chunk.token_ids))))
        for row in plan.rows:
            self._write(row.lane, row.position, self.last_token[row.lane])
            tokens.append((row.lane, self._read(row.lane, row.position + 1)))
        assert [lane for lane, _ in tokens] == [sample.lane for sample in plan.samples]
        for lane, token in tokens:
            self.last_token[lane] = token
        return StepResult(plan.step, [token for _, token in tokens], [None] * len(tokens), [[] for _ in plan.chunks])

    def _write(self, lane, position, token):
        self.pages[self.tables[lane][position // BLOCK_SIZE]][position % BLOCK_SIZE] = token

    def _read(self, lane, num_tokens):
        table = self.tables[lane]
        return next_token([self.pages[table[at // BLOCK_SIZE]][at % BLOCK_SIZE] for at in range(num_tokens)])


class World:
    """Scheduler, blocks and tags, stepped like the engine does it; every invariant is checked after every step."""

    def __init__(
        self,
        *,
        num_pages=16,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=None,
        prefix_caching=True,
        run_ahead=0,
    ):
        self.blocks = BlockManager(num_pages, secret=b"secret", prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len or num_pages * BLOCK_SIZE,
            vocab_size=VOCAB,
            end_token_ids=(END_TOKEN,),
        )
        self.runner = TagRunner(num_pages, max_num_seqs)
        self.run_ahead = run_ahead
        self.in_flight = deque()
        self.plans = []
        self.submitted = {}
        self.outputs = {}
        self.ends = {}
        self.cached = {}

    def submit(self, request_id, prompt, max_tokens=8, salt="", **params):
        submit = Submit(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
            cache_salt=salt,
        )
        self.scheduler.add(submit)
        self.submitted[request_id] = submit
        self.outputs[request_id] = []

    def abort(self, request_id):
        self.scheduler.abort(request_id)

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if not plan.is_empty:
            self.plans.append(plan)
            self.in_flight.append(self.runner.run(plan))
        deltas = self.scheduler.take_ended()
        while len(self.in_flight) > (0 if plan.is_empty else self.run_ahead):
            deltas += self.scheduler.commit(self.in_flight.popleft())
        self.scheduler.check()
        for delta in deltas:
            self._take(delta)
        return plan

    def _take(self, delta):
        assert delta.request_id not in self.ends, f"{delta.request_id} spoke after its end"
        self.outputs[delta.request_id] += delta.token_ids
        if delta.cached_tokens is not None:
            self.cached[delta.request_id] = delta.cached_tokens
        if delta.finish_reason is not None:
            self.ends[delta.request_id] = delta.finish_reason

    @property
    def has_work(self):
        return self.scheduler.has_work or bool(self.in_flight)

    def run(self, max_steps=10_000):
        """Step until everybody has ended; then every output is what it should be and every page is free."""
        for _ in range(max_steps):
            if not self.has_work:
                break
            self.step()
        assert not self.has_work, f"not done after {max_steps} steps"
        self.verify()

    def verify(self):
        assert self.ends.keys() == self.submitted.keys()
        for request_id, submit in self.submitted.items():
            expected = expected_tokens(submit)
            output = self.outputs[request_id]
            if self.ends[request_id] == "abort":
                assert output == expected[: len(output)]
            else:
                assert output == expected
                stopped = expected[-1] == END_TOKEN and not submit.params.ignore_eos
                assert self.ends[request_id] == ("stop" if stopped else "length")
        assert self.blocks.num_available == self.blocks.num_pages
        assert self.scheduler.stats().num_running == self.scheduler.stats().num_waiting == 0
