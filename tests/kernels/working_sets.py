"""Lanes with working sets in any state that the rules allow, as plain lists and as tensors, for the tests beside it."""

import math
import random
import struct
from typing import NamedTuple

import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.select_blocks import SlotMaps


class Lanes:
    """Tables of a few lanes and one layer, filled at random.

    ring_start[lane]: the first block of its ring. Slots hold block 0 and others that have left the ring. Where `empty`
    is False, as many slots are filled as can be; else any are empty, wherever they stand.
    """

    def __init__(self, seed, *, num_lanes=4, kv_heads=2, num_slots=6, max_blocks=20, empty=True, clock=5):
        self.random = random.Random(seed)
        self.num_lanes, self.kv_heads = num_lanes, kv_heads
        self.num_slots, self.max_blocks = num_slots, max_blocks
        self.ring_start = [self.random.randrange(max_blocks - 3) for _ in range(num_lanes)]
        self.slot_block = [[self._slots(start, empty) for _ in range(kv_heads)] for start in self.ring_start]
        # Few values, so that many are equal.
        self.slot_used = self._each(num_slots, lambda: self.random.randrange(clock))
        self.sparse = [self.random.random() < 0.8 for _ in range(num_lanes)]

    def _slots(self, start, empty):
        blocks = [0] * (start > 0) + self.random.sample(range(1, max(start, 1)), max(min(start, self.num_slots) - 1, 0))
        if empty:
            blocks = [block for block in blocks if block == 0 or self.random.random() < 0.7]
        blocks += [-1] * (self.num_slots - len(blocks))
        if empty or -1 not in blocks:
            self.random.shuffle(blocks)
        return blocks

    def _each(self, size, draw):
        return [[[draw() for _ in range(size)] for _ in range(self.kv_heads)] for _ in range(self.num_lanes)]

    def block_slot(self):
        """What the maps say the other way round."""
        inverse = self._each(self.max_blocks, lambda: -1)
        for lane, heads in enumerate(self.slot_block):
            for head, slots in enumerate(heads):
                for slot, block in enumerate(slots):
                    if block >= 0:
                        inverse[lane][head][block] = slot
        return inverse

    def maps(self, device):
        tables = (self.slot_block, self.slot_used, self.block_slot())
        return SlotMaps(*(torch.tensor(table, dtype=torch.int32, device=device) for table in tables))

    def entries(self, count):
        """Some lanes in any order, and padding between them."""
        lanes = self.random.sample(range(self.num_lanes), min(count, self.num_lanes))
        return [lane if self.random.random() < 0.85 else -1 for lane in lanes]

    def ranking(self, lanes, advance=0, values=4):
        """[entries][kv_heads][blocks] scores of few values for blocks [1, ring_start + advance), -inf elsewhere."""
        return [
            [
                [
                    float(self.random.randrange(values)) if 1 <= block < self.start(lane) + advance else -float("inf")
                    for block in range(self.max_blocks)
                ]
                for _ in range(self.kv_heads)
            ]
            for lane in lanes
        ]

    def start(self, lane):
        return self.ring_start[lane] if lane >= 0 else 0


def first_wanted(scores, count):
    """Of one head's list of scores, the count best, lower blocks first: a set of blocks."""
    ranked = [block for block, score in enumerate(scores) if score > -float("inf")]
    return set(sorted(ranked, key=lambda block: (-scores[block], block))[:count])


E4M3 = [(8 * (code >= 8) + code % 8) * 2.0 ** (max(code // 8, 1) - 10) for code in range(127)]
"""The numbers of that format that are not negative, as the code says them: 4 bits of exponent, 3 of mantissa."""


def to_e4m3(x):
    """The nearest number of E4M3, of two as near the one of even code; beyond all of them the last."""
    size = min(abs(x), E4M3[-1])
    nearest = min(range(127), key=lambda code: (abs(size - E4M3[code]), code % 2))
    return math.copysign(E4M3[nearest], x)


def slow(head_dim):
    """The half of the coordinates that RoPE turns by the smallest angles a token."""
    angles = [10000.0 ** (-2 * (d % (head_dim // 2)) / head_dim) for d in range(head_dim)]
    return sorted(sorted(range(head_dim), key=lambda d: angles[d])[: head_dim // 2])


class Digest(NamedTuple):
    """Of a block: extremes [min, max][slow coordinate], levels [16][slow coordinate], as lists."""

    extremes: list
    levels: list


def single(x):
    """The nearest number of float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def expected_digest(keys):
    """Of a block's [16][head_dim] keys, as lists."""
    keys = [[key[d] for d in slow(len(key))] for key in keys]
    least, most = ([to_e4m3(pick(column)) for column in zip(*keys)] for pick in (min, max))
    levels = [[expected_level(*numbers) for numbers in zip(key, least, most)] for key in keys]
    return Digest([least, most], levels)


def expected_level(x, least, most):
    """The nearest of 4 levels from `least` to `most`, of two as near the lower one."""
    sixths = single(single(x - least) * 6)  # of what lies between; the rest is exact in float32
    return sum(sixths > (most - least) * odd for odd in (1, 3, 5))


def unpack_levels(keys, size):
    """[..., size] levels, of [..., n] bytes, as `Digests` says where they are, one by one."""
    num_bytes = keys.shape[-1]
    assert num_bytes == -(-size // 4)
    return torch.stack([keys[..., d % num_bytes] >> 2 * (d // num_bytes) & 3 for d in range(size)], dim=-1)


def expected_logit(q, extremes):
    """What one query of head_dim numbers expects to find in a block of these extremes, [min, max][slow]."""
    own = [q[d] for d in slow(len(q))]
    terms = (x * (a + b) / 2 + 0.7 * abs(x) * (b - a) / 2 for x, a, b in zip(own, *extremes))
    return sum(terms) / math.sqrt(len(q))


def expected_key_logit(q, digest):
    """The same by the levels of the block's keys: the logarithm of the sum of the exponentials of 16 logits."""
    own, (least, most) = [q[d] for d in slow(len(q))], digest.extremes
    logits = []
    for levels in digest.levels:
        key = [a + (b - a) * level / 3 for a, b, level in zip(least, most, levels)]
        logits.append(sum(x * y for x, y in zip(own, key)) / math.sqrt(len(q)))
    top = max(logits)
    return top + math.log(sum(math.exp(logit - top) for logit in logits))


def by_head(logits):
    """[entries, 2, heads, blocks], of logits as they are."""
    return logits.transpose(3, 4).flatten(2, 3)


def by_block(logits, kv_heads):
    """The other way round, with no numbers where no head is."""
    logits = logits.unflatten(2, (kv_heads, -1)).transpose(3, 4)
    group = logits.shape[-1]
    padded = logits.new_full((*logits.shape[:-1], 2 ** (group - 1).bit_length()), math.nan)
    padded[..., :group] = logits
    return padded[..., :group]


def group_scores(logits, held=()):
    """[blocks] scores of a KV head's [group][blocks] logits, a lead for blocks that are held; shares of each head."""
    shares, scores = [], [0.0] * len(logits[0])
    for own in logits:
        norm = math.log(sum(math.exp(logit) for logit in own)) if max(own) > -math.inf else 0.0
        shares.append([math.exp(logit - norm) for logit in own])
        scores = [score + math.exp(logit - norm / 2) for score, logit in zip(scores, own)]
    scores = [math.log(score) if score > 0 else -math.inf for score in scores]
    return [score + 0.5 * (block in held) for block, score in enumerate(scores)], shares


def mask(sets, num_blocks, device):
    """[entries][kv_heads] sets of blocks as bool [entries, kv_heads, num_blocks]."""
    rows = [[[block in own for block in range(num_blocks)] for own in heads] for heads in sets]
    return torch.tensor(rows, dtype=torch.bool, device=device).view(len(sets), -1, num_blocks)


def victims(slots, used, wanted):
    """The slots of one head that may be taken, in the order in which they are."""
    empty = [slot for slot, block in enumerate(slots) if block < 0]
    unwanted = [slot for slot, block in enumerate(slots) if block > 0 and block not in wanted]
    return empty + sorted(unwanted, key=lambda slot: (used[slot], slot))


def assert_consistent(maps, ring_start=None):
    """Maps are inverse, nothing is held twice, and nothing that is in a ring: ring_start [num_lanes] if given."""
    slot_block, block_slot = maps.slot_block.tolist(), maps.block_slot.tolist()
    for lane, heads in enumerate(slot_block):
        for head, slots in enumerate(heads):
            held = {block: slot for slot, block in enumerate(slots) if block >= 0}
            assert len(held) == sum(block >= 0 for block in slots), "held twice"
            inverse = {block: slot for block, slot in enumerate(block_slot[lane][head]) if slot >= 0}
            assert inverse == held
            assert ring_start is None or all(block < ring_start[lane] for block in held)


def pages_for(lanes, columns, device):
    """[num_lanes, columns] int32: pages of their own for every lane, in no order."""
    return torch.randperm(lanes * columns).to(device, torch.int32).view(lanes, columns)


def blocks_of_text(*shape, device, dtype, head_dim=4):
    """Random K and V [*shape, 2, 16, head_dim], no two alike."""
    return torch.randn(*shape, 2, BLOCK_SIZE, head_dim, device=device).to(dtype)
