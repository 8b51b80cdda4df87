"""Rows of sparse lanes: where the ring is, in what order keys are seen, and that attention sees just those."""

import math
import random

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.decode_attention import decode_attention_reference, decode_attention_triton, decode_batch
from minserve.kernels.sparse_rows import (
    RING,
    LaneTables,
    Ring,
    advance_ring,
    begin_rows,
    begin_rows_reference,
    begin_rows_triton,
    sparse_attention_reference,
)

from .working_sets import Lanes, blocks_of_text, pages_for

BOTH = pytest.mark.parametrize("begin", [begin_rows_reference, begin_rows_triton])
ATTENTIONS = pytest.mark.parametrize("attend", [decode_attention_reference, decode_attention_triton])


def ints(values, device, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


def tables_of(sparse, ring_start, num_tokens=None):
    """Of lanes that do not look ahead."""
    num_tokens = ring_start if num_tokens is None else num_tokens
    return LaneTables(num_tokens, ring_start, sparse, torch.zeros_like(sparse), torch.zeros_like(ring_start))


def advance(begin, num_tokens, ring_start, sparse, lanes):
    """The ring that a step is given, without any rows to speak of."""
    nothing, given = torch.zeros_like(lanes), torch.full((4, len(lanes) + 1), 77, device=lanes.device)
    table = torch.zeros(len(sparse), 1 + RING, dtype=torch.int32, device=lanes.device)
    tables = tables_of(sparse, ring_start, num_tokens)
    begin(nothing, nothing, table, tables, lanes, given[:, :-1], 1, BLOCK_SIZE)
    assert given[0].tolist() == [lane if lane >= 0 and sparse[lane] else -1 for lane in lanes.tolist()] + [77]
    return Ring(*given[1:, :-1])


@BOTH
def test_the_ring_follows_a_step_behind_and_says_what_leaves_it(begin, device):
    num_tokens = ints([1, 33, 48, 49, 49, 500], device)
    ring_start = ints([0, 0, 0, 1, 2, 3], device)
    sparse = ints([True] * 5 + [False], device, torch.bool)
    ring = advance(begin, num_tokens, ring_start, sparse, ints([5, 3, -1, 0, 1, 2, 4], device))
    assert ring.start.tolist() == [0, 1, 0, 0, 0, 0, 2]
    assert ring.next_start.tolist() == [0, 2, 0, 0, 1, 1, 2]
    assert ring.retiring.tolist() == [-1, 1, -1, -1, 0, 0, -1]
    assert ring_start.tolist() == [0, 1, 1, 2, 2, 3]


@BOTH
@pytest.mark.parametrize(
    ("num_tokens", "start", "next_start"), [(200, 1, 2), (200, 10, 11), (200, 11, 11), (20, 4, 4), (1, 0, 0), (0, 0, 0)]
)
def test_at_most_one_block_leaves_in_a_step_and_none_comes_back(begin, num_tokens, start, next_start, device):
    ring_start, lanes = ints([start], device), ints([0], device)
    ring = advance(begin, ints([num_tokens], device), ring_start, lanes == 0, lanes)
    assert (ring.next_start.tolist(), ring_start.tolist()) == ([next_start], [next_start])
    assert ring.retiring.tolist() == [start if next_start > start else -1]


@pytest.mark.parametrize(("accepted", "drafts"), [(0, 0), (1, 1), (7, 8), (7, 7), (3, 8)])
def test_a_step_s_rows_are_within_the_ring_and_the_page_of_a_block_that_leaves_is_not_written(accepted, drafts, device):
    chance = random.Random(accepted)
    num_tokens, ring_start = ints([1], device), ints([0], device)
    sparse, lanes = ints([True], device, torch.bool), ints([0], device)
    for _ in range(150):
        ring = advance_ring(num_tokens, ring_start, sparse, lanes)
        first, last = (num_tokens.item() - 1) // BLOCK_SIZE, (num_tokens.item() - 1 + drafts) // BLOCK_SIZE
        assert ring.start.item() <= max(first - 1, 0), "the complete block before the one being filled is in the ring"
        assert last < ring.start.item() + RING, "a row reaches the page of a block that is still attended"
        num_tokens += 1 + chance.randint(0, accepted)


class Batch:
    """Some dense and some sparse lanes, with rows at the end of each, and what attention needs for them."""

    def __init__(self, seed, device, dtype, *, rows=2, kv_heads=2, group=3, head_dim=4, num_slots=5, max_blocks=12):
        torch.manual_seed(seed)
        self.lanes = Lanes(seed, kv_heads=kv_heads, num_slots=num_slots, max_blocks=max_blocks, empty=False)
        chance, count = self.lanes.random, self.lanes.num_lanes
        self.entries = self.lanes.entries(count)
        self.num_slots, self.rows = num_slots, rows
        columns = max(num_slots + RING, max_blocks)
        self.page_table = pages_for(count, columns, device)
        self.kv = blocks_of_text(count * columns, kv_heads, device=device, dtype=dtype, head_dim=head_dim)
        # Each lane's first row and last are anywhere in its ring.
        self.first = [
            start * BLOCK_SIZE + chance.randrange(RING * BLOCK_SIZE - rows + 1) for start in self.lanes.ring_start
        ]
        self.lengths = [self.first[lane] + 1 + row if lane >= 0 else 0 for lane in self.entries for row in range(rows)]
        self.q = torch.randn(count * rows, kv_heads * group, head_dim, device=device).to(dtype)
        self.device = device

    def sparse_rows(self, begin=begin_rows):
        places = [self.place(lane, self.first[lane] + row) for lane in self.entries for row in range(self.rows)]
        # What step_inputs says of a sparse row's place is wrong, but for -1.
        wrong = [
            -1 if place < 0 else place if not self.is_sparse(n // self.rows) else 10**9
            for n, place in enumerate(places)
        ]
        arguments = (ints(self.lengths, self.device), ints(wrong, self.device), self.page_table)
        tables = tables_of(ints(self.lanes.sparse, self.device, torch.bool), ints(self.lanes.ring_start, self.device))
        lanes, given = ints(self.entries, self.device), torch.empty(4, len(self.entries), dtype=torch.int64)
        given = given.to(self.device)
        return places, begin(*arguments, tables, lanes, given, self.num_slots, BLOCK_SIZE)[0]

    def is_sparse(self, entry):
        return self.entries[entry] >= 0 and self.lanes.sparse[self.entries[entry]]

    def place(self, lane, position):
        if lane < 0 or position % 5 == 0:
            return -1
        block = position // BLOCK_SIZE
        column = self.num_slots + block % RING if self.lanes.sparse[lane] else block
        return self.page_table[lane, column].item() * BLOCK_SIZE + position % BLOCK_SIZE

    def seen(self, entry, row, head):
        """(page, slot) of each key that a row sees, by the rules."""
        lane, position = self.entries[entry], self.first[self.entries[entry]] + row
        table = self.page_table[lane].tolist()
        if not self.lanes.sparse[lane]:
            return [(table[t // BLOCK_SIZE], t % BLOCK_SIZE) for t in range(position + 1)]
        slots = [slot for slot, block in enumerate(self.lanes.slot_block[lane][head]) if block >= 0]
        keys = [(table[slot], t) for slot in slots for t in range(BLOCK_SIZE)]
        ring = range(self.lanes.ring_start[lane] * BLOCK_SIZE, position + 1)
        return keys + [(table[self.num_slots + t // BLOCK_SIZE % RING], t % BLOCK_SIZE) for t in ring]

    def expected(self):
        """[rows, heads, head_dim] float64; NaN for padding."""
        group, out = self.q.shape[1] // self.kv.shape[1], torch.full(self.q.shape, torch.nan, dtype=torch.float64)
        for entry, lane in enumerate(self.entries):
            for row in range(self.rows) if lane >= 0 else []:
                for head in range(self.q.shape[1]):
                    keys = [
                        self.kv[page, head // group, :, t].double() for page, t in self.seen(entry, row, head // group)
                    ]
                    k, v = torch.stack(keys, dim=1).cpu()
                    query = self.q[entry * self.rows + row, head].double().cpu()
                    out[entry * self.rows + row, head] = (k @ query / math.sqrt(len(query))).softmax(0) @ v
        return out


@BOTH
@pytest.mark.parametrize("seed", range(12))
def test_every_row_is_told_its_keys_in_an_order_and_where_its_own_goes(begin, seed, device, dtype):
    batch = Batch(seed, device, dtype, rows=1 + seed % 3)
    places, rows = batch.sparse_rows(begin)
    assert rows.places.tolist() == places
    assert rows.entries.tolist() == [entry if lane >= 0 else -1 for entry, lane in enumerate(batch.entries)]
    for n, length in enumerate(rows.lengths.tolist()):
        entry, row = divmod(n, batch.rows)
        if batch.entries[entry] < 0:
            assert length == 0
            continue
        table = rows.page_table[entry].tolist()
        told = [(table[t // BLOCK_SIZE], t % BLOCK_SIZE) for t in range(length)]
        for head in range(batch.kv.shape[1]):
            assert sorted(told) == sorted(batch.seen(entry, row, head))


@ATTENTIONS
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 64), (3, 3, 64), (2, 4, 128), (1, 8, 64)])
def test_dense_and_sparse_rows_of_one_batch_attend_to_their_keys(attend, kv_heads, group, head_dim, device, dtype):
    batch = Batch(7 * group, device, dtype, kv_heads=kv_heads, group=group, head_dim=head_dim)
    _, rows = batch.sparse_rows()
    decode = decode_batch(rows.page_table, rows.entries, rows.lengths, batch.kv)
    assert_close(attend(batch.q, batch.kv, decode), batch.expected(), dtype)


@pytest.mark.parametrize("seed", range(8))
def test_the_oracle_goes_by_the_maps(seed, device, dtype):
    batch = Batch(seed, device, dtype, rows=1 + seed % 3)
    batch.lanes.sparse = [True] * batch.lanes.num_lanes
    slot_block = batch.lanes.maps(device).slot_block
    lanes, lengths = ints(batch.entries, device), ints(batch.lengths, device)
    start = ints([batch.lanes.start(lane) for lane in batch.entries], device)
    # Nothing that is not seen has a part in it.
    seen = {
        (page, head, t)
        for entry, lane in enumerate(batch.entries)
        for head in range(batch.kv.shape[1])
        for page, t in (batch.seen(entry, batch.rows - 1, head) if lane >= 0 else [])
    }
    unseen = torch.ones(batch.kv.shape[0], batch.kv.shape[1], BLOCK_SIZE, dtype=torch.bool)
    for place in seen:
        unseen[place] = False
    kv = batch.kv.masked_fill(unseen.to(device)[:, :, None, :, None], torch.nan)
    out = sparse_attention_reference(batch.q, kv, batch.page_table, slot_block, lanes, lengths, start)
    assert_close(out, batch.expected(), dtype)


def assert_close(out, expected, dtype):
    real = ~expected[:, 0, 0].isnan()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(out.cpu().double()[real], expected[real], atol=tolerance, rtol=tolerance)


@BOTH
@pytest.mark.parametrize(("rows", "expected"), [(1, [0, 0, 0, 0, 0]), (3, [2, 0, 2, 2, 2]), (4, [3, 0, 3, 3, 2])])
def test_sparse_lanes_look_ahead_behind_what_they_verify_and_others_by_their_last_row(begin, rows, expected, device):
    sparse, looks_ahead = (ints(each, device, torch.bool) for each in ([1, 1, 0, 1, 1], [1, 0, 0, 1, 1]))
    tables = LaneTables(*ints([[99] * 5, [3] * 5], device), sparse, looks_ahead, ints([2, 2, 0, 7, 1], device))
    lanes, nothing = ints([0, 1, 2, 3, 4], device), ints([0] * 5 * rows, device)
    table = torch.zeros(5, 1 + RING, dtype=torch.int32, device=device)
    given = torch.empty(4, 5, dtype=torch.int64, device=device)
    _, ahead = begin(nothing, nothing, table, tables, lanes, given, 1, BLOCK_SIZE)
    assert ahead.tolist() == expected


@BOTH
def test_a_table_of_more_columns_than_a_program_takes(begin, device):
    num_slots, start, columns = 5, 2, 4100
    table = pages_for(2, columns, device)
    lanes, sparse = ints([1, 0], device), ints([False, True], device, torch.bool)
    lengths = ints([start * BLOCK_SIZE + 20, 4090 * BLOCK_SIZE], device)
    tables, given = tables_of(sparse, ints([0, start], device)), torch.empty(4, 2, dtype=torch.int64, device=device)
    rows, _ = begin(lengths, ints([0, 7], device), table, tables, lanes, given, 5, BLOCK_SIZE)
    assert torch.equal(rows.page_table[1], table[0])
    ring = [num_slots + block % RING for block in (start, start + 1, start + 2)]
    assert rows.page_table[0, : start + RING].tolist() == table[1, [0, 1, *ring]].tolist()
    assert rows.lengths.tolist() == lengths.tolist(), "while no slot is filled twice, nothing is left out"
    assert rows.places.tolist() == [table[1, num_slots + 3 % RING].item() * BLOCK_SIZE + 3, 7]


@BOTH
def test_rows_that_see_nothing_stay_so(begin, device):
    batch = Batch(1, device, torch.float32, rows=1)
    nobody = torch.full((4,), -1, device=device)
    zeros = torch.zeros_like(nobody)
    sparse = ints(batch.lanes.sparse, device, torch.bool)
    tables, given = tables_of(sparse, ints([3] * 4, device)), torch.empty(4, 4, dtype=torch.int64, device=device)
    rows, _ = begin(zeros, nobody, batch.page_table, tables, nobody, given, 5, BLOCK_SIZE)
    assert tables.ring_start.tolist() == [3] * 4
    assert (rows.lengths.tolist(), rows.places.tolist(), rows.entries.tolist()) == ([0] * 4, [-1] * 4, [-1] * 4)
    slot_block = batch.lanes.maps(device).slot_block
    out = sparse_attention_reference(batch.q, batch.kv, batch.page_table, slot_block, nobody, zeros, zeros)
    assert not out.any()


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    batch = Batch(1, device, torch.float32, rows=1)
    lengths, sparse = ints(batch.lengths, device), ints(batch.lanes.sparse, device, torch.bool)
    lanes, table, tables = ints(batch.entries, device), batch.page_table, tables_of(sparse, lengths)
    given = torch.empty(4, 4, dtype=torch.int64, device=device)
    for wrong in (
        (lengths.int(), lengths, table, tables, lanes, given, 5),
        (lengths, lengths[:2], table, tables, lanes, given, 5),
        (lengths, lengths, table.long(), tables, lanes, given, 5),
        (lengths, lengths, table, tables._replace(ring_start=lengths.int()), lanes, given, 5),
        (lengths, lengths, table, tables._replace(sparse=sparse[:1]), lanes, given, 5),
        (lengths, lengths, table, tables, lanes, given[:3], 5),
        (lengths, lengths, table, tables, lanes, given, table.shape[1] - 2),
    ):
        with pytest.raises(AssertionError):
            begin_rows(*wrong)
