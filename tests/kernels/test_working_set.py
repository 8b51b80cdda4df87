"""A layer's working sets over many steps: rank, select, fetch, retire, attend, as a server does it.

Keys, values and queries are small integers. So digests are exact, many logits are equal, and every page can be told by
what it holds: it is compared with the text's own keys and values, of which the test keeps a plain copy.
"""

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import Digests, build_digests, empty_digests
from minserve.kernels.decode_attention import decode_attention_reference, decode_batch
from minserve.kernels.fetch_blocks import fetch_blocks, retire_block
from minserve.kernels.fp8 import FP8
from minserve.kernels.rank_blocks import rank_blocks
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL
from minserve.kernels.score_keys import expect_in_blocks
from minserve.kernels.select_blocks import FetchPlan, SlotMaps, select_blocks
from minserve.kernels.sparse_rows import (
    RING,
    LaneTables,
    advance_ring,
    begin_rows,
    sparse_attention_reference,
    sparse_rows,
)
from minserve.kernels.step_inputs import step_inputs_reference
from minserve.kernels.store_blocks import store_blocks

from .working_sets import assert_consistent, expected_digest, expected_key_logit, group_scores, pages_for

INF = float("inf")
KV_HEADS, GROUP, HEAD_DIM = 2, 2, 4
MAX_BLOCKS, DRAFTS = 16, 3
LANES = [2, -1, 0, 1]
SPARSE = [True, False, True]
"""Lane 1 is resident."""


class Server:
    """Three lanes that begin with their first token."""

    def __init__(self, device, num_slots, cap, allowance, integers=True):
        self.random, self.integers = random.Random(num_slots), integers
        torch.manual_seed(num_slots)
        self.device, self.num_slots, self.cap = device, num_slots, cap
        columns = max(MAX_BLOCKS, num_slots + RING)
        block = (KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM)
        self.text = self.numbers(3, MAX_BLOCKS, *block)
        self.kv, self.host = self.numbers(3 * columns, *block), self.numbers(3 * MAX_BLOCKS, 1, *block)
        self.digests = empty_digests((3 * MAX_BLOCKS,), KV_HEADS, HEAD_DIM, self.kv.dtype, device)
        self.digests.extremes.copy_(torch.tensor(torch.nan))
        self.page_table = pages_for(3, columns, device)
        # A digest has the place that its block has in host memory.
        self.host_table = pages_for(3, MAX_BLOCKS, device)
        self.num_tokens, self.ring_start = (torch.full((3,), value, device=device) for value in (1, 0))
        self.allowance, self.step = (
            torch.full((size,), value, dtype=torch.int32, device=device) for size, value in ((3, allowance), (1, 0))
        )
        self.maps = SlotMaps(
            *(
                torch.full((3, KV_HEADS, size), fill, dtype=torch.int32, device=device)
                for size, fill in ((num_slots, -1), (num_slots, 0), (MAX_BLOCKS, -1))
            )
        )
        self.lanes, self.sparse = torch.tensor(LANES, device=device), torch.tensor(SPARSE, device=device)

    def numbers(self, *shape):
        if self.integers:
            return torch.randint(-2, 3, shape, device=self.device).float()
        return torch.randn(shape, device=self.device)

    def rows(self, ring):
        """(lengths as if all were dense, what sparse_rows makes of the step), for a token and its drafts."""
        drafts = torch.full((3, DRAFTS), -1, device=self.device)
        tables = (self.num_tokens, drafts, self.num_tokens, torch.full_like(self.num_tokens, 10**6), self.page_table)
        _, _, places, lengths = step_inputs_reference(*tables, self.lanes, DRAFTS, BLOCK_SIZE)
        rows = sparse_rows(lengths, places, self.page_table, self.sparse, self.lanes, ring.start, self.num_slots)
        return lengths, rows

    def write(self, places):
        """Random keys and values into pages and into the text."""
        for number, place in enumerate(places.tolist()):
            lane = LANES[number // (1 + DRAFTS)]
            if lane >= 0:
                position = self.num_tokens[lane].item() - 1 + number % (1 + DRAFTS)
                new = self.numbers(KV_HEADS, 2, HEAD_DIM)
                self.kv[place // BLOCK_SIZE, :, :, place % BLOCK_SIZE] = new
                self.text[lane, position // BLOCK_SIZE, :, :, position % BLOCK_SIZE] = new

    def attend(self, ring):
        """(queries, lengths, what they attend to) of a step's rows; writes the rows' keys and values."""
        lengths, rows = self.rows(ring)
        self.write(rows.places)
        # Heads of different sizes: else blocks might be equal but for the order in which heads are summed.
        q = self.numbers(len(lengths), KV_HEADS, GROUP, HEAD_DIM) * torch.tensor([[1.0], [3.0]], device=self.device)
        q = q.flatten(1, 2)
        batch = decode_batch(rows.page_table, rows.entries, rows.lengths, self.kv)
        return q, lengths, decode_attention_reference(q, self.kv, batch)

    def background(self, ring, q):
        """Rank, select, fetch and retire: (queries of the lookahead row, plan)."""
        rows = q.view(len(LANES), 1 + DRAFTS, KV_HEADS * GROUP, HEAD_DIM)
        queries = torch.stack((rows[:, DRAFTS], rows[:, 0]), dim=1)
        logits = expect_in_blocks(queries, self.digests, self.host_table, self.lanes, ring.next_start, MAX_BLOCKS)
        block_slot = self.maps.block_slot
        scores, wanted, *_ = rank_blocks(logits, block_slot, self.lanes, ring.start, self.num_slots - 1)
        plan = select_blocks(
            wanted[:, LOOKAHEAD],
            scores,
            wanted[:, NORMAL],
            self.maps,
            self.lanes,
            self.sparse,
            ring.start,
            self.allowance,
            self.step,
            self.cap,
        )
        pages = (self.kv, self.page_table)
        fetch_blocks(plan, self.maps, self.lanes, self.step, self.host, 0, self.host_table, *pages)
        row = torch.full_like(self.lanes, LOOKAHEAD)
        retire_block(ring.retiring, wanted, row, self.maps, self.lanes, self.step, *pages)
        self.step += 1
        return queries[:, LOOKAHEAD], plan

    def accept(self):
        """Some drafts are right; blocks that are full then get their digests and host blocks."""
        pages, places = [], []
        for lane in range(3):
            before = (self.num_tokens[lane].item() - 1) // BLOCK_SIZE
            self.num_tokens[lane] += 1 + self.random.randint(0, DRAFTS)
            if (self.num_tokens[lane].item() - 1) // BLOCK_SIZE > before:
                column = self.num_slots + before % RING if SPARSE[lane] else before
                pages.append(self.page_table[lane, column].item())
                places.append(self.host_table[lane, before].item())
                self.host[places[-1], 0] = self.text[lane, before]
        pages, places = [*pages, -1], [*places, -1]
        build_digests(self.kv, self.digests, *(torch.tensor(each, device=self.device) for each in (pages, places)))

    def scores(self, lane, head, query, end):
        """[end] floats, by the keys of the text itself and what was in slots."""
        digests = [expected_digest(keys) for keys in self.text[lane, 1:end, head, 0].tolist()]
        heads = query[head * GROUP : (head + 1) * GROUP].tolist()
        logits = [[-INF, *(expected_key_logit(q, digest) for digest in digests)] for q in heads]
        return group_scores(logits, self.held_before[lane][head])[0]

    def held(self, lane, head):
        """The blocks in a head's slots, whose pages hold what the text says."""
        slots = self.maps.slot_block[lane, head].tolist()
        for slot, block in enumerate(slots):
            if block >= 0:
                page = self.page_table[lane, slot].item()
                assert torch.equal(self.kv[page, head], self.text[lane, block, head])
        return [block for block in slots if block >= 0]


def run(server, check):
    """Steps until a lane is full; after each, check(ring, the lookahead row's queries, plan, q, lengths, attention)."""
    while server.num_tokens.max() <= (MAX_BLOCKS - 1) * BLOCK_SIZE:
        ring = advance_ring(server.num_tokens, server.ring_start, server.sparse, server.lanes)
        q, lengths, attended = server.attend(ring)
        oracle = sparse_attention_reference(
            q, server.kv, server.page_table, server.maps.slot_block, server.lanes, lengths, ring.start
        )
        for number, length in enumerate(lengths.tolist()):
            lane = LANES[number // (1 + DRAFTS)]
            if lane >= 0:
                expected = oracle[number] if SPARSE[lane] else dense_attention(server, q[number], lane, length)
                assert torch.allclose(attended[number], expected, atol=1e-5)
        server.held_before = [[server.held(lane, head) for head in range(KV_HEADS)] for lane in range(3)]
        queries, plan = server.background(ring, q)
        assert_consistent(server.maps, server.ring_start.tolist())
        for lane in (0, 2):
            # One number for all heads and layers, as sparse_rows has it.
            filled = [len(server.held(lane, head)) for head in range(KV_HEADS)]
            assert filled == [min(server.ring_start[lane].item(), server.num_slots)] * KV_HEADS
        check(ring, queries, plan, q, lengths, attended)
        server.accept()
    assert bool((server.maps.slot_block[1] < 0).all()), "a resident lane has no working set"


def dense_attention(server, q, lane, length):
    k, v = server.text[lane].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return F.scaled_dot_product_attention(q.view(KV_HEADS, GROUP, HEAD_DIM), k, v).view(q.shape)


@pytest.mark.parametrize("num_slots", [1, 2, 4, 7])
def test_without_a_cap_slots_hold_block_0_and_the_best_by_the_last_ranking(num_slots, device):
    server = Server(device, num_slots, cap=MAX_BLOCKS, allowance=1000)

    def check(ring, queries, plan, *_):
        for entry, lane in enumerate(LANES):
            if lane in (0, 2):
                end = ring.next_start[entry].item()
                for head in range(KV_HEADS):
                    held = server.held(lane, head)
                    assert len(held) == min(num_slots, end)
                    scores = dict(enumerate(server.scores(lane, head, queries[entry], end))) if end else {}
                    assert scores.pop(0, None) is None or 0 in held
                    best, others = ([scores[b] for b in scores if (b in held) == each] for each in (True, False))
                    assert min(best, default=INF) > max(others, default=-INF) - 1e-4
        assert not plan.counters[..., 2].any()

    run(server, check)


def test_with_a_slot_for_every_block_attention_is_dense_and_nothing_is_fetched(device):
    server = Server(device, MAX_BLOCKS, cap=2, allowance=1000)

    def check(ring, queries, plan, q, lengths, attended):
        assert bool((plan.blocks < 0).all())
        assert not plan.counters[..., 1:4].any()
        for number, length in enumerate(lengths.tolist()):
            lane = LANES[number // (1 + DRAFTS)]
            if lane >= 0:
                assert torch.allclose(attended[number], dense_attention(server, q[number], lane, length), atol=1e-5)

    run(server, check)


@pytest.mark.parametrize(("cap", "allowance"), [(1, 1000), (2, 1), (0, 1000), (3, 0)])
def test_with_caps_maps_and_pages_agree_and_traffic_is_bounded(cap, allowance, device):
    server = Server(device, 4, cap, allowance)
    fetched = 0

    def check(ring, queries, plan, *_):
        nonlocal fetched
        is_fetch = plan.blocks >= 0
        hits, misses, cut, *_ = plan.counters.unbind(dim=-1)
        assert torch.equal(misses - cut, is_fetch.sum(dim=-1).int())
        assert bool((is_fetch.sum(dim=(1, 2)) <= allowance).all())
        assert bool((hits + misses < server.num_slots).all())
        fetched += is_fetch.sum().item()
        for lane in (0, 2):
            for head in range(KV_HEADS):
                assert server.ring_start[lane] == 0 or 0 in server.held(lane, head)

    run(server, check)
    assert (fetched > 0) == (cap > 0 and allowance > 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("cap", "allowance"), [(1, 1000), (2, 3), (16, 1000)])
def test_a_captured_background_with_pinned_host_blocks_equals_the_cpu(cap, allowance, device):
    """Of normal numbers: the two round differently, so that of equal logits either might take the better."""
    server = Server(torch.device("cpu"), 4, cap, allowance, integers=False)
    mirror = copy.copy(server)
    for name, value in vars(server).items():
        if isinstance(value, torch.Tensor):
            setattr(mirror, name, value.to(device))
    mirror.maps = SlotMaps(*(table.to(device) for table in server.maps))
    mirror.host = server.host.clone().pin_memory()
    mirror.digests = empty_digests((3 * MAX_BLOCKS,), KV_HEADS, HEAD_DIM, server.kv.dtype, device)
    q = torch.zeros(len(LANES) * (1 + DRAFTS), KV_HEADS * GROUP, HEAD_DIM, device=device)

    def background():
        ring = advance_ring(mirror.num_tokens, mirror.ring_start, mirror.sparse, mirror.lanes)
        return mirror.background(ring, q)[1]

    background()  # compiles; with a token and no block in each lane, only the clock goes on
    mirror.step.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = background()

    while server.num_tokens.max() <= (MAX_BLOCKS - 1) * BLOCK_SIZE:
        ring = advance_ring(server.num_tokens, server.ring_start, server.sparse, server.lanes)
        queries, _, _ = server.attend(ring)
        q.copy_(queries)
        for name in ("num_tokens", "kv", "host"):
            getattr(mirror, name).copy_(getattr(server, name))
        for copied, table in zip(mirror.digests, server.digests):
            copied.copy_(table)
        graph.replay()
        _, expected = server.background(ring, queries)
        for found, wanted in zip((*plan, *mirror.maps, mirror.kv), (*expected, *server.maps, server.kv)):
            assert torch.equal(found.cpu(), wanted)
        server.accept()


def test_on_a_cpu_one_row_stands_for_two_that_are_the_same():
    server = Server(torch.device("cpu"), 4, 2, 1000, integers=False)
    server.num_tokens.fill_((MAX_BLOCKS - 1) * BLOCK_SIZE)
    keys = torch.randn(3 * MAX_BLOCKS, KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM)
    build_digests(keys, server.digests, *2 * (torch.arange(3 * MAX_BLOCKS),))
    one = torch.randn(len(LANES), 1, KV_HEADS * GROUP, HEAD_DIM)
    rankings = []
    for queries in (one, one.expand(-1, 2, -1, -1).contiguous()):
        tables = (server.digests, server.host_table, server.lanes, torch.full_like(server.lanes, 14), 8)
        logits = expect_in_blocks(queries, *tables)
        start = torch.full_like(server.lanes, 13)
        rankings.append(rank_blocks(logits, server.maps.block_slot, server.lanes, start, 3))
    assert rankings[0].wanted.any()
    for one, two in zip(*rankings, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_no_operation_looks_at_what_tensors_hold():
    """As in a CUDA graph: tensors that hold nothing are enough, and every shape is known."""

    def ints(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    entries, num_lanes, slots, columns = 3, 4, 5, 20
    lanes, sparse = ints(entries, dtype=torch.int64), ints(num_lanes, dtype=torch.bool)
    table, host_table, step = ints(num_lanes, columns), ints(num_lanes, MAX_BLOCKS), ints(1)
    kv, host = (torch.empty(*shape, 2, 2, 16, 8, device="meta") for shape in ((9,), (7, 2)))
    digests = Digests(torch.empty(6, 2, 2, 4, device="meta"), ints(6, 2, 16, 1, dtype=torch.uint8))
    maps = SlotMaps(*(ints(num_lanes, 2, size) for size in (slots, slots, MAX_BLOCKS)))
    counts = [ints(num_lanes, dtype=torch.int64) for _ in range(2)]

    build_digests(kv, digests, lanes, lanes)
    ring = advance_ring(*counts, sparse, lanes)
    tables, given = LaneTables(*counts, sparse, sparse, counts[0]), ints(4, entries, dtype=torch.int64)
    rows, _ = begin_rows(*(ints(6, dtype=torch.int64) for _ in range(2)), table, tables, lanes, given, slots)
    assert rows.page_table.shape == (entries, columns)
    queries = torch.empty(entries, 2, 6, 8, device="meta")
    logits = expect_in_blocks(queries, digests, host_table, lanes, ring.next_start, 5)
    scores, wanted, *_ = rank_blocks(logits, maps.block_slot, lanes, ring.start, slots - 1)
    q = torch.empty(6, 6, 8, device="meta")
    sparse_attention_reference(q, kv, table, maps.slot_block, lanes, rows.lengths, ring.start)
    arguments = (wanted[:, 0], scores, wanted[:, 1], maps, lanes, sparse, ring.start, ints(num_lanes), step, 2)
    plan = select_blocks(*arguments)
    assert isinstance(plan, FetchPlan)
    fetch_blocks(plan, maps, lanes, step, host, 1, host_table, kv, table)
    scales = torch.empty(host.shape[:4], device="meta")
    fetch_blocks(plan, maps, lanes, step, host.to(FP8), 1, host_table, kv, table, scales)
    retire_block(ring.retiring, wanted, lanes, maps, lanes, step, kv, table)
    store_blocks(torch.empty(2, *kv.shape, device="meta"), host, lanes, lanes)
