"""What takes the place of the runner, the device and the link in the simulation.

Instead of keys and values, a page holds the tokens that were written into it, and the model is a hash of every token
that a row can read through its page table. A page that was freed too early, shared wrongly, loaded from the wrong block
or never written therefore changes what is read, and each read is compared with what the request should have there.

Everything happens at the worst moment that the rules allow. The lanes' tables are written when a step is planned, while
the steps before it may still have to run. A launched step reads and writes pages only when its result is asked for.
Copies run between their start and the moment their end is seen, some early and late, in any order; they can fail, and
be reported twice.
"""

import hashlib
import random
from dataclasses import dataclass

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import StepResult
from minserve.memory.copies import Completion
from minserve.protocol import TokenLogprobs

VOCAB = 50
POISON = [-1] * BLOCK_SIZE


def next_token(tokens):
    """What the model of this world says after `tokens`."""
    return hashlib.blake2b(bytes(tokens), digest_size=4).digest()[0] % VOCAB


def prompt_logprob(position, token):
    """What the model of this world says of a prompt's token: its position, so that none can be taken for another."""
    return TokenLogprobs(token, float(-position), 1, [])


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
        self.num_tokens = [0] * num_lanes
        self.end = [0] * num_lanes
        self._link = link
        self._random = random.Random(link.seed)
        self._luck = random.Random(link.seed)
        self._polls = 0
        self._copies = []
        self._staging = {}

    # ---- steps ----

    def prepare(self, plan):
        for setup in plan.setups:
            self.tables[setup.lane] = []
            self.last_token[setup.lane] = setup.last_token
            self.num_tokens[setup.lane], self.end[setup.lane] = setup.num_tokens, setup.end
        for lane, first, pages in plan.new_pages:
            assert first == len(self.tables[lane]), "pages were added to a table with a gap"
            self.tables[lane].extend(pages)

    def run(self, plan, texts):
        """texts: what each lane of the plan should hold, by lane."""
        tokens, prompt_logprobs = [], []
        for chunk in plan.chunks:
            for offset, token in enumerate(chunk.token_ids):
                self._write(chunk.lane, chunk.start + offset, token)
            read = self._read(chunk.lane, chunk.start + len(chunk.token_ids), texts)
            assert (
                chunk.following == -1
                or chunk.following == texts[chunk.lane].upto(chunk.start + len(chunk.token_ids) + 1)[-1]
            )
            assert (chunk.following == -1) == chunk.samples
            if chunk.samples:
                tokens.append((chunk.lane, [read]))
            prompt_logprobs.append([prompt_logprob(*at) for at in enumerate(chunk.prompt_targets, chunk.start + 1)])
        tokens += [(lane, self._decode(lane, plan.num_drafts, texts)) for lane in plan.decodes]
        assert [lane for lane, _ in tokens] == [sample.lane for sample in plan.samples]
        for lane, own in tokens:
            self.last_token[lane] = own[-1]
            self.num_tokens[lane] += len(own)
        return StepResult(plan.step, [own for _, own in tokens], [None] * len(tokens), prompt_logprobs)

    def _decode(self, lane, num_drafts, texts):
        """One token, and one for each draft that happens to be right; the others leave wrong tokens behind."""
        first = self.num_tokens[lane] - 1
        num_right = self._luck.randint(0, num_drafts)
        rows = [self.last_token[lane]]
        for number in range(num_drafts):
            right = texts[lane].upto(first + number + 2)[-1]
            rows.append(right if number < num_right else (right + 1) % VOCAB)
        for position, token in enumerate(rows, first):
            if position <= self.end[lane] - 2:  # behind that no row yields anything that anybody wants
                self._write(lane, position, token)
        return [
            self._read(lane, position + 1, texts) if position <= self.end[lane] - 2 else VOCAB - 1
            for position in range(first, first + num_right + 1)
        ]

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
            if copy.kind == "store" and self._random.random() < 0.5:
                # Gathered into a staging buffer now, it crosses the link from there; else the page is read late.
                self._staging[self.staging_buffer(copy)] = list(self.pages[copy.page])
            due = self._polls + self._random.randint(1, self._link.max_delay)
            ok = self._random.random() >= self._link.failure_rate
            self._copies.append((due, ok, copy))
            if self._random.random() < 0.5:
                self._move(copy, ok)  # already now, and again at the end: launched steps may run in between

    def staging_buffer(self, copy):
        return copy.id

    def _move(self, copy, ok):
        if copy.kind == "store":
            source = self._staging.get(self.staging_buffer(copy), self.pages[copy.page])
            self.host[copy.host] = list(source) if ok else list(POISON)
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
