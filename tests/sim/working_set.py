"""A sparse lane of the simulated device: slots and ring as the kernels keep them, with tokens for keys and values.

Each KV head (there is one layer) has maps of its own, and wants whatever chance says. What a row may attend is checked
against what the request should have there: each block once, from the page where the maps say that it is. What is
asked of slots, ring and retirement is in the docstrings of kernels/sparse_rows.py, select_blocks.py, fetch_blocks.py.
"""

from dataclasses import dataclass

from minserve.config import BLOCK_SIZE

RING = 3


@dataclass
class Background:
    """What a step's background pass knows of a lane: how many tokens the step found, and the ring of its rows."""

    lane: object
    start: int
    next_start: int


class SparseLane:
    """table: K pages of slots and three of the ring; slots: for each head, the block of each slot, or -1."""

    def __init__(self, demotion, device, own):
        self.heads = range(len(device.host[0]))
        self.device, self.own, self.policy = device, own, demotion.policy
        self.table = [*demotion.slot_pages, *demotion.ring_pages]
        self.num_slots = len(demotion.slot_pages)
        self.start = max((demotion.num_tokens - 1) // BLOCK_SIZE - 1, 0)
        self.slots, self.hosts = [], {}
        self.allowance = 0
        self.has_retried = False
        self.fetched = (0, 0, 0, 0, 0)
        self._take_over(demotion)

    def _take_over(self, demotion):
        device, start = self.device, self.start
        filled = min(start, self.num_slots)
        assert all(block == -1 for block in demotion.slot_blocks[filled:]), "a slot holds what it must not"
        assert len(demotion.host_blocks) == start
        before = {block: list(device.pages[page]) for block, page in enumerate(demotion.pages)}
        for head in self.heads:
            chosen = [0, *device.luck.sample(range(1, start), filled - 1)] if filled else []
            slots = [block if block in chosen else -1 for block in demotion.slot_blocks]
            missing = iter([block for block in chosen if block not in slots])
            for slot in range(filled):
                if slots[slot] == -1:
                    slots[slot] = next(missing)
                    self._fill(slot, head, before[slots[slot]][head])
            self.slots.append(slots)
        for source, page in demotion.ring_copies:
            device.pages[page] = [list(content) for content in device.pages[source]]
        for block, host in enumerate(demotion.host_blocks):
            self._learn(block, host)
        for head in self.heads:
            self._check_slots(head)

    def take_stored(self, block, host):
        """A host block holds a block by now; its digest is made from the ring."""
        assert block >= self.start, "a block was stored after it had left the ring"
        for content in self.device.pages[self._ring_page(block)]:
            self._check(block, content, BLOCK_SIZE, "a digest was made from what is not the block")
        self._learn(block, host)

    def _learn(self, block, host):
        assert block not in self.hosts, "a block was stored twice"
        self.hosts[block] = host

    def refill(self, blocks, most):
        assert 0 <= blocks <= most
        self.allowance = min(self.allowance + blocks, most)

    def write(self, position, token):
        for content in self.device.contents(self._ring_page(position // BLOCK_SIZE)):
            content[position % BLOCK_SIZE] = token + self.own.mark

    def attend(self, position):
        """What a row sees: the filled slots, and the ring up to its own position."""
        newest = position // BLOCK_SIZE
        assert newest - self.start < RING, "a row reaches the block behind the ring"
        for head in self.heads:
            self._check_slots(head)
            for block in range(self.start, newest + 1):
                content = self.device.pages[self._ring_page(block)][head]
                self._check(block, content, min(BLOCK_SIZE, position + 1 - block * BLOCK_SIZE), "in the ring")

    def _check_slots(self, head):
        slots, filled = self.slots[head], min(self.start, self.num_slots)
        held = slots[:filled]
        assert min(held, default=0) >= 0, "an empty slot is attended"
        assert set(slots[filled:]) <= {-1}, "a filled slot is not attended"
        assert len(set(held)) == filled, "a block is attended twice"
        assert all(block < self.start for block in held), "a block is in a slot and in the ring"
        for slot, block in enumerate(held):
            self._check(block, self.device.pages[self.table[slot]][head], BLOCK_SIZE, "in a slot")

    def _check(self, block, content, num_tokens, where):
        self.own.check(block * BLOCK_SIZE, content[:num_tokens], where)

    def begin_background(self, num_tokens):
        """Of a step that found so many tokens: what its background pass will do."""
        wanted = (num_tokens - 1) // BLOCK_SIZE - 1
        return Background(self, self.start, min(max(wanted, self.start), self.start + 1))

    def run_background(self, step):
        """Rank, select, fetch; then the block that leaves the ring takes a slot, or is dropped."""
        luck, hits, misses, cut = self.device.luck, 0, 0, 0
        leaving = step.start if step.next_start > step.start else None
        wanted_by_head = []
        for head in self.heads:
            ranked = range(1, step.next_start)
            wanted = {0, *luck.sample(ranked, min(self.num_slots, len(ranked)))}
            wanted_by_head.append(wanted)
            slots = self.slots[head]
            hits += len(wanted.intersection(slots))
            missing = [block for block in sorted(wanted) if block not in slots and block < step.start]
            evictable = [slot for slot, block in enumerate(slots) if block not in wanted and block != 0]
            admitted = min(len(missing), len(evictable), self.policy.cap, self.allowance)
            misses, cut = misses + len(missing), cut + len(missing) - admitted
            self.allowance -= admitted
            for block, slot in zip(missing[:admitted], evictable, strict=False):
                assert slots[slot] != -1, "a fetch took an empty slot"
                slots[slot] = block
                self._fill(slot, head, self.device.host[self.hosts[block]][head])
                self._check(block, self.device.pages[self.table[slot]][head], BLOCK_SIZE, "fetched")
        if leaving is not None:
            assert leaving in self.hosts, "a block left the ring before it was stored"
            for head, wanted in enumerate(wanted_by_head):
                self._retire(leaving, head, wanted)
        self.start = step.next_start
        surprises = luck.randint(0, self.num_slots)
        self.fetched = (hits, misses, cut, surprises, surprises + luck.randint(0, 3))

    def _retire(self, leaving, head, wanted):
        slots = self.slots[head]
        empty = [slot for slot, block in enumerate(slots) if block == -1]
        evictable = empty + [slot for slot, block in enumerate(slots) if block not in wanted and block > 0]
        if evictable and (empty or leaving in wanted):
            slots[evictable[0]] = leaving
            self._fill(evictable[0], head, self.device.pages[self._ring_page(leaving)][head])

    def _fill(self, slot, head, content):
        self.device.pages[self.table[slot]][head] = list(content)

    def _ring_page(self, block):
        return self.table[self.num_slots + block % RING]
