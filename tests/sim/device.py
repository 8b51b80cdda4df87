"""What takes the place of the runner, the device and the link in the simulation.

Instead of keys and values, a page holds the tokens that were written into it, and the model is a hash of every token
that a row can read through its page table. A page that was freed too early, shared wrongly, loaded from the wrong block
or never written therefore changes what is read, and each read is compared with what the request should have there.
What was computed sparsely, or after that, carries its policy's mark, and only who has the same policy may read it.

Everything happens at the worst moment that the rules allow. The lanes' tables are written when a step is planned, while
the steps before it may still have to run. A launched step reads and writes pages only when its result is asked for, and
its background pass may run as late as the next step. Copies run between their start and the moment their end is seen,
some early and late, in any order; they can fail, and be reported twice.
"""

import hashlib
import random
from dataclasses import dataclass

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import Fetched, StepResult
from minserve.memory.copies import Completion
from minserve.protocol import TokenLogprobs
from tests.sim.working_set import SparseLane

VOCAB = 50
MARK = 64
HEADS = 2
NOTHING = Fetched(0, 0, 0, 0, 0)


def poisoned():
    """What is in a page or host block that nobody has written."""
    return [[-1] * BLOCK_SIZE] * HEADS


def copied(heads):
    """The same contents, in lists of their own."""
    if all(content is heads[0] for content in heads):
        return [list(heads[0])] * HEADS
    return [list(content) for content in heads]


def next_token(tokens):
    """What the model of this world says after `tokens`."""
    return hashlib.blake2b(bytes(tokens), digest_size=4).digest()[0] % VOCAB


def prompt_logprob(position, token):
    """What the model of this world says of a prompt's token: its position, so that none can be taken for another."""
    return TokenLogprobs(token, float(-position), 1, [])


@dataclass
class Own:
    """What a lane should hold: a text, and from exact_to on perhaps computed under the policy with this mark; None: all
    of it is exact."""

    text: object
    exact_to: int | None
    mark: int

    def upto(self, num_tokens):
        return self.text.upto(num_tokens)

    def check(self, first, read, where):
        """What was read from position `first` on is what should be there."""
        tokens = read if self.exact_to is None else [entry % MARK for entry in read]
        assert tokens == self.upto(first + len(read))[first:], f"not its own: what was read {where}"
        if self.exact_to is not None:
            assert all(entry < MARK for entry in read[: max(0, self.exact_to - first)]), "exact KV is not exact"
            assert {entry - entry % MARK for entry in read} <= {0, self.mark}, "KV of another policy was read"


@dataclass
class Link:
    """How copies fare: each ends 1 to max_delay polls after its start."""

    seed: int = 0
    max_delay: int = 1
    failure_rate: float = 0.0
    repeat_rate: float = 0.0


class Device:
    """Page contents, the lanes' page tables and last tokens, host blocks, and the copies under way.

    pages: for each page the tokens of each head, which are one list as long as no head went its own way.
    """

    def __init__(self, num_pages, num_lanes, num_host_blocks, link):
        self.pages = [poisoned() for _ in range(num_pages)]
        self.host = [poisoned() for _ in range(num_host_blocks)]
        self.tables = [[] for _ in range(num_lanes)]
        self.last_token = [None] * num_lanes
        self.num_tokens = [0] * num_lanes
        self.end = [0] * num_lanes
        self.sparse = {}
        self._with_queries = set()
        self.luck = random.Random(link.seed)
        self._background = []
        self._link = link
        self._random = random.Random(link.seed)
        self._polls = 0
        self._copies = []
        self._staging = {}

    def contents(self, page):
        """The lists of tokens of a page, each once."""
        heads = self.pages[page]
        return heads[:1] if all(content is heads[0] for content in heads) else heads

    # ---- steps ----

    def prepare(self, plan):
        self._perhaps_run_background()
        for setup in plan.setups:
            assert all(step.lane is not self.sparse.get(setup.lane) for step in self._background), "a lane is in use"
            self.sparse.pop(setup.lane, None)
            self._with_queries.discard(setup.lane)
            self.tables[setup.lane] = []
            self.last_token[setup.lane] = setup.last_token
            self.num_tokens[setup.lane], self.end[setup.lane] = setup.num_tokens, setup.end
        for lane, first, pages in plan.new_pages:
            assert first == len(self.tables[lane]), "pages were added to a table with a gap"
            self.tables[lane].extend(pages)
        hosts = {host for _, _, host in plan.stored} | {host for entry in plan.demotions for host in entry.host_blocks}
        assert hosts.isdisjoint(copy.host for _, _, copy, _ in self._copies if copy.kind == "store"), "not yet durable"

    def run(self, plan, texts):
        """texts: what each lane of the plan should hold, by lane."""
        self.run_background()
        for demotion in plan.demotions:
            lane = demotion.lane
            assert demotion.num_tokens == self.num_tokens[lane], "a lane became sparse with rows under way"
            assert lane in plan.decodes
            assert lane in self._with_queries, "a lane became sparse without the queries that say what it holds"
            assert lane not in self.sparse
            self.sparse[lane] = SparseLane(demotion, self, texts[lane])
        for lane, block, host in plan.stored:
            self.sparse[lane].take_stored(block, host)
        for lane, blocks, most in plan.refills:
            self.sparse[lane].refill(blocks, most)
        tokens, prompt_logprobs = [], []
        for chunk in plan.chunks:
            read = self._chunk(chunk, texts[chunk.lane])
            if chunk.samples:
                tokens.append((chunk.lane, [read]))
            prompt_logprobs.append([prompt_logprob(*at) for at in enumerate(chunk.prompt_targets, chunk.start + 1)])
        tokens += [(lane, self._decode(lane, plan.num_drafts, texts[lane])) for lane in plan.decodes]
        assert [lane for lane, _ in tokens] == [sample.lane for sample in plan.samples]
        sparse = [lane for lane in plan.decodes if lane in self.sparse]
        assert sparse == [lane for lane, _, _ in plan.refills], "not all sparse lanes get their allowance"
        assert plan.keeps_queries or not sparse
        (self._with_queries.update if plan.keeps_queries else self._with_queries.difference_update)(plan.decodes)
        self._background = [self.sparse[lane].begin_background(self.num_tokens[lane]) for lane in sparse]
        for lane, own in tokens:
            if own:
                self.last_token[lane] = own[-1]
                self.num_tokens[lane] += len(own)
        fetched = [Fetched(*self.sparse[lane].fetched) if lane in self.sparse else NOTHING for lane in plan.decodes]
        result = [own for _, own in tokens], [None] * len(tokens), prompt_logprobs
        self._perhaps_run_background()
        seconds = (None, 0.001, 1.0)[plan.step % 3]
        return StepResult(plan.step, *result, fetched=fetched if plan.keeps_queries else (), seconds=seconds)

    def run_background(self):
        """What the last step does in the background, if it has not been done yet."""
        background, self._background = self._background, []
        for step in background:
            step.lane.run_background(step)

    def _perhaps_run_background(self):
        if self._background and self.luck.random() < 0.1:
            self.run_background()

    def _chunk(self, chunk, own):
        end = chunk.start + len(chunk.token_ids)
        mark = self._mark(chunk.lane, chunk.start, own)
        for position, token in enumerate(chunk.token_ids, chunk.start):
            self._write(chunk.lane, position, token + mark)
        assert chunk.following == -1 or chunk.following == own.upto(end + 1)[-1]
        assert (chunk.following == -1) == chunk.samples
        return self._read(chunk.lane, end, own)

    def _decode(self, lane, num_drafts, own):
        """One token, and one for each draft that happens to be right; the others leave wrong tokens behind. None at
        all, from a sparse lane that has to run again."""
        sparse, first = self.sparse.get(lane), self.num_tokens[lane] - 1
        num_right = self.luck.randint(0, num_drafts)
        rows = [self.last_token[lane]]
        for number in range(num_drafts):
            right = own.upto(first + number + 2)[-1]
            rows.append(right if number < num_right else (right + 1) % VOCAB)
        mark = 0 if sparse else self._mark(lane, first, own)
        for position, token in enumerate(rows, first):
            if position <= self.end[lane] - 2:  # behind that no row yields anything that anybody wants
                if sparse:
                    sparse.write(position, token)
                else:
                    self._write(lane, position, token + mark)
        if sparse:
            num_right = min(num_right, sparse.policy.num_verified)
            sparse.has_retried = not sparse.has_retried and self._wants_retry(sparse)
            if sparse.has_retried:
                sparse.attend(min(first, self.end[lane] - 2))
                return []
        return [
            self._read(lane, position + 1, own) if position <= self.end[lane] - 2 else VOCAB - 1
            for position in range(first, first + num_right + 1)
        ]

    def _wants_retry(self, sparse):
        return sparse.policy.retry_above is not None and self.luck.random() < 0.25

    def _mark(self, lane, position, own):
        """The mark of what is computed at a position of a resident lane: that of all before it."""
        if own.exact_to is None:
            return 0
        table, before = self.tables[lane], range(min(position, self.end[lane] - 1))  # no row writes behind that
        marked = any(self.pages[table[at // BLOCK_SIZE]][0][at % BLOCK_SIZE] >= MARK for at in before)
        return own.mark if marked else 0

    def _write(self, lane, position, token):
        for content in self.contents(self.tables[lane][position // BLOCK_SIZE]):
            content[position % BLOCK_SIZE] = token

    def _read(self, lane, num_tokens, own):
        if lane in self.sparse:
            self.sparse[lane].attend(num_tokens - 1)
            return own.upto(num_tokens + 1)[-1]
        read = []
        for page in self.tables[lane][: -(-num_tokens // BLOCK_SIZE)]:
            first, *others = self.pages[page]
            content = first[: num_tokens - len(read)]
            assert all(other is first or other[: len(content)] == content for other in others), "heads differ"
            read += content
        own.check(0, read, f"in lane {lane}")
        return next_token([entry % MARK for entry in read])

    # ---- copies (a CopyEngine) ----

    def submit(self, copies):
        self._perhaps_run_background()
        for copy in copies:
            if copy.kind == "store" and self._random.random() < 0.5:
                # Gathered into a staging buffer now, it crosses the link from there; else the page is read late.
                self._staging[self.staging_buffer(copy)] = copied(self.pages[copy.page])
            due = self._polls + self._random.randint(1, self._link.max_delay)
            ok = self._random.random() >= self._link.failure_rate
            now, at_end = self._random.choice([(True, False), (True, True), (False, True), (False, True)])
            self._copies.append((due, ok, copy, at_end))
            if now:
                self._move(copy, ok)  # launched steps and background passes may run between this and the end

    def staging_buffer(self, copy):
        return copy.id

    def _move(self, copy, ok):
        if copy.kind == "store":
            source = self._staging.get(self.staging_buffer(copy), self.pages[copy.page])
            self.host[copy.host] = copied(source) if ok else poisoned()
        else:
            self.pages[copy.page] = copied(self.host[copy.host]) if ok else poisoned()

    def poll(self):
        self._polls += 1
        due = [entry for entry in self._copies if entry[0] <= self._polls]
        self._copies = [entry for entry in self._copies if entry[0] > self._polls]
        self._random.shuffle(due)
        completions = []
        for _, ok, copy, at_end in due:
            if at_end:
                self._move(copy, ok)
            completions.append(Completion(copy.id, ok))
            if self._random.random() < self._link.repeat_rate:
                completions.append(Completion(copy.id, ok))
        return completions
