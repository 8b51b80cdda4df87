"""Prefill cut into the shapes that are planned computes what masked attention over everything computes."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import Chunk
from minserve.runner.attention import DecodeAttention, KVContext
from minserve.runner.prefill import KEY_STEP, PIECE_KEYS, FlashShapes, PrefillAttention, cut_into_pieces

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
NUM_PAGES = 600
SHAPES = FlashShapes.for_chunks_of(KEY_STEP)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def context(num_lanes):
    """Pages full of KV, each lane's in an order of its own."""
    order = torch.randperm(NUM_PAGES).to(torch.int32)
    return KVContext(
        kv=torch.randn(1, NUM_PAGES, KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM),
        page_table=order.view(num_lanes, -1),
        rope_table=torch.randn(NUM_PAGES * BLOCK_SIZE, 2, HEAD_DIM // 2),
        norm_eps=1e-6,
        num_heads=HEADS,
    )


def attend(own, chunks, shapes, qkv):
    pages = KVContext(own.kv.clone(), own.page_table, own.rope_table, own.norm_eps, own.num_heads)
    return PrefillAttention(pages, chunks, shapes)(0, qkv, None), pages.kv


def assert_same(own, *spans):
    chunks = [
        Chunk(lane=lane, start=start, token_ids=[0] * count, samples=True) for lane, (start, count) in enumerate(spans)
    ]
    qkv = torch.randn(sum(count for _, count in spans), HEADS + 2 * KV_HEADS, HEAD_DIM)
    expected, expected_kv = attend(own, chunks, None, qkv)
    actual, actual_kv = attend(own, chunks, SHAPES, qkv)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(actual_kv, expected_kv)


@pytest.mark.parametrize("count", [1, 100, 128, 129, KEY_STEP])
@pytest.mark.parametrize("start", [0, 16, 100, KEY_STEP - 1, KEY_STEP, KEY_STEP + 1, 3 * KEY_STEP + 700])
def test_a_chunk_may_begin_anywhere_and_be_of_any_length(start, count):
    assert_same(context(1), (start, count))


def test_chunks_of_several_prompts_are_computed_in_one_pass():
    assert_same(context(3), (0, 5), (KEY_STEP + 17, 130), (40, 1))


@pytest.mark.parametrize("shapes", [None, SHAPES])
def test_the_last_layer_may_leave_out_rows_that_say_nothing(shapes):
    own = context(4)
    spans = [(0, 5, True), (KEY_STEP + 17, 130, False), (40, 1, True)]
    chunks = [
        Chunk(lane=lane, start=start, token_ids=[0] * count, samples=samples)
        for lane, (start, count, samples) in enumerate(spans)
    ]
    position = torch.tensor([70, 71])
    places = own.page_table[3, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    qkv = torch.randn(136 + 2, HEADS + 2 * KV_HEADS, HEAD_DIM)
    found = []
    for is_last in (False, True):
        pages = KVContext(own.kv.clone(), own.page_table, own.rope_table, own.norm_eps, own.num_heads)
        decode = DecodeAttention(pages, torch.tensor([3]), position, places, position + 1)
        attend = PrefillAttention(pages, chunks, shapes, decode)
        found.append((attend.last(0, qkv, None) if is_last else attend(0, qkv, None)[attend.wanted], pages.kv))
    assert attend.wanted.tolist() == [4, 135, 136, 137]
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    assert torch.equal(found[1][1], found[0][1])


def test_of_a_chunk_that_says_nothing_the_last_layer_stores_keys_and_values_alone():
    own = context(1)
    attend = PrefillAttention(own, [Chunk(lane=0, start=3, token_ids=[0] * 20, samples=False)], SHAPES)
    before = own.kv.clone()
    assert attend.last(0, torch.randn(20, HEADS + 2 * KV_HEADS, HEAD_DIM), None).shape == (0, HEADS * HEAD_DIM)
    assert not torch.equal(own.kv, before)


def test_earlier_keys_are_cut_into_few_sizes():
    assert PIECE_KEYS[-1] == KEY_STEP
    for steps in range(40):
        pieces = cut_into_pieces(steps * KEY_STEP)
        ends = [0] + [first + size for first, size in pieces]
        assert [first for first, _ in pieces] == ends[:-1]
        assert ends[-1] == steps * KEY_STEP
        assert {size for _, size in pieces} <= set(PIECE_KEYS)


@pytest.mark.parametrize("max_tokens", [1, 64, 100, 512, 2048, 5000, 8192, 30_000])
def test_every_chunk_finds_its_shape_among_the_planned_ones(max_tokens):
    shapes = FlashShapes.for_chunks_of(max_tokens)
    planned = set(shapes.all(max_keys=40_960))
    for count in {1, max_tokens // 2 + 1, max_tokens}:
        for front in (0, 1, KEY_STEP - 1):
            side = shapes.square(front + count)
            assert side >= front + count
            assert (side, side, True) in planned
        rows = shapes.row_size(count)
        assert rows >= count
        assert {(rows, keys, False) for keys in PIECE_KEYS if keys < 40_960} <= planned


def test_a_short_context_plans_no_more_than_it_can_need():
    shapes = FlashShapes.for_chunks_of(8192)
    planned = shapes.all(max_keys=600)
    assert max(keys for _, keys, _ in planned) == 1024
    assert all(causal for _, _, causal in planned)
