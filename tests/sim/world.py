"""A world in which the real scheduler, block manager and host tier run without a model.

`Device` takes the place of the runner, the device and the link. Instead of keys and values, a page holds the tokens
that were written into it, and the model is a hash of every token that a row can read through its page table. A page
that was freed too early, shared wrongly, loaded from the wrong block or never written therefore changes what is read,
and each read is compared with what the request should have there.

Steps run late: a launched step reads and writes pages only when the device gets to it, at the latest when its result is
asked for. Copies run later still, in any order; they can fail, and be reported twice.
"""

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import StepResult
from minserve.engine.scheduler import Scheduler
from minserve.memory.blocks import BlockManager
from minserve.memory.copies import Completion
from minserve.protocol import SamplingParams, Submit

VOCAB = 50
END_TOKEN = 0
POISON = [-1] * BLOCK_SIZE


def next_token(tokens):
    """What the model of this world says after `tokens`."""
    return hashlib.blake2b(bytes(tokens), digest_size=4).digest()[0] % VOCAB


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


@dataclass
class Link:
    """How copies fare: each ends 1 to max_delay polls after its start."""

    seed: int = 0
    max_delay: int = 1
    failure_rate: float = 0.0
    repeat_rate: float = 0.0


class Device:
    """Page contents, the lanes' page tables and last tokens, host blocks, and the copies under way."""

    def __init__(self, num_pages, num_lanes, num_host_blocks, link):
        self.pages = [list(POISON) for _ in range(num_pages)]
        self.host = [list(POISON) for _ in range(num_host_blocks)]
        self.tables = [[] for _ in range(num_lanes)]
        self.last_token = [None] * num_lanes
        self._link = link
        self._random = random.Random(link.seed)
        self._polls = 0
        self._copies = []
        self._staging = {}

    # ---- steps ----

    def run(self, plan, texts):
        """texts: what each lane of the plan should hold, by lane."""
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
            read = self._read(chunk.lane, chunk.start + len(chunk.token_ids), texts)
            if chunk.samples:
                tokens.append((chunk.lane, read))
        for row in plan.rows:
            self._write(row.lane, row.position, self.last_token[row.lane])
            tokens.append((row.lane, self._read(row.lane, row.position + 1, texts)))
        assert [lane for lane, _ in tokens] == [sample.lane for sample in plan.samples]
        for lane, token in tokens:
            self.last_token[lane] = token
        return StepResult(plan.step, [token for _, token in tokens], [None] * len(tokens), [[] for _ in plan.chunks])

    def _write(self, lane, position, token):
        self.pages[self.tables[lane][position // BLOCK_SIZE]][position % BLOCK_SIZE] = token

    def _read(self, lane, num_tokens, texts):
        table = self.tables[lane]
        read = [self.pages[table[at // BLOCK_SIZE]][at % BLOCK_SIZE] for at in range(num_tokens)]
        assert read == texts[lane].upto(num_tokens), f"lane {lane} read what is not its own"
        return next_token(read)

    # ---- copies (a CopyEngine) ----

    def submit(self, copies):
        for copy in copies:
            # A store is gathered into a staging buffer first and crosses the link from there.
            self._staging[self.staging_buffer(copy)] = list(self.pages[copy.page])
            due = self._polls + self._random.randint(1, self._link.max_delay)
            ok = self._random.random() >= self._link.failure_rate
            self._copies.append((due, ok, copy))
            if self._random.random() < 0.5:
                self._move(copy, ok)  # done at once, reported later: launched steps may come after it

    def staging_buffer(self, copy):
        return copy.id

    def _move(self, copy, ok):
        if copy.kind == "store":
            self.host[copy.host] = list(self._staging[self.staging_buffer(copy)]) if ok else list(POISON)
        else:
            self.pages[copy.page] = list(self.host[copy.host]) if ok else list(POISON)

    def poll(self):
        self._polls += 1
        due = [entry for entry in self._copies if entry[0] <= self._polls]
        self._copies = [entry for entry in self._copies if entry[0] > self._polls]
        self._random.shuffle(due)
        completions = []
        for _, ok, copy in due:
            self._move(copy, ok)
            completions.append(Completion(copy.id, ok))
            if self._random.random() < self._link.repeat_rate:
                completions.append(Completion(copy.id, ok))
        return completions


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
    run_ahead: int = 0
    late_steps: bool = True
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
        )
        self.in_flight = deque()
        self.plans = []
        self.submitted = {}
        self.replaced = []
        self.texts = {}
        self.outputs = {}
        self.ends = {}
        self.cached = {}
        self.cached_host = {}

    def submit(self, request_id, prompt, max_tokens=8, salt="", **params):
        submit = Submit(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
            cache_salt=salt,
        )
        self.scheduler.add(submit)
        if request_id in self.submitted:
            self.replaced.append(self.submitted[request_id])
        self.submitted[request_id] = submit
        self.texts[request_id] = Text(submit.prompt_token_ids)
        self.outputs[request_id] = []

    def abort(self, request_id):
        self.scheduler.abort(request_id)

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if not plan.is_empty:
            self.plans.append(plan)
            texts = {request.lane: self.texts[request.id] for request in self.scheduler.running}
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

    def _catch_up(self, num_left):
        """Let the device run all launched steps but the num_left newest."""
        for launched in list(self.in_flight)[: len(self.in_flight) - num_left]:
            if launched.result is None:
                launched.result = self.device.run(launched.plan, launched.texts)

    def _take(self, delta):
        assert delta.request_id not in self.ends, f"{delta.request_id} spoke after its end"
        self.outputs[delta.request_id] += delta.token_ids
        if delta.cached_tokens is not None:
            self._check_tenant(delta.request_id, delta.cached_tokens)
            self.cached[delta.request_id] = delta.cached_tokens
            self.cached_host[delta.request_id] = delta.cached_host_tokens
        if delta.finish_reason is not None:
            self.ends[delta.request_id] = delta.finish_reason

    def _check_tenant(self, request_id, num_cached):
        """Cached tokens come from the same prefix of a request with the same salt."""
        own = self.submitted[request_id]
        tokens = own.prompt_token_ids[:num_cached]
        others = self.replaced + [other for name, other in self.submitted.items() if name != request_id]
        assert not num_cached or any(
            other.cache_salt == own.cache_salt and Text(other.prompt_token_ids).upto(num_cached) == tokens
            for other in others
        ), f"{request_id} was given another tenant's blocks"

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
        assert self.blocks.num_available == self.num_pages, "pages are still held"
        assert self.blocks.num_host_held == 0, "host blocks are still held"
        assert self.scheduler.stats().num_running == self.scheduler.stats().num_waiting == 0
