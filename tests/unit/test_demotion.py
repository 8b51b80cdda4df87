"""A resident request becomes sparse in its own pages: what stays, what is copied, what is given back, what is found."""

import pytest

from minserve.config import BLOCK_SIZE
from minserve.memory.blocks import BlockManager
from minserve.memory.copies import SyncCopies
from minserve.memory.hashing import KeyChain

POLICY = b"policy"


def manager(num_pages=32, num_host_blocks=64):
    return BlockManager(
        num_pages,
        secret=b"secret",
        prefix_caching=True,
        num_host_blocks=num_host_blocks,
        copies=SyncCopies(lambda copy: None),
    )


def tokens_of(num_tokens):
    return [number % 251 for number in range(num_tokens)]


def decoding(blocks, request_id, num_tokens, chain=None):
    """A resident request with so many tokens, all but the last computed, and its full blocks in host blocks."""
    tokens = tokens_of(num_tokens)
    cached = blocks.open(request_id, tokens, chain or KeyChain())
    if cached is not None:
        blocks.publish(request_id, tokens, num_tokens - 1)
        blocks.poll_copies()
    return cached


def demoted(blocks, request_id, num_tokens, num_slots, step=1, **options):
    places = blocks.demote(request_id, num_tokens, num_slots, POLICY, step=step, **options)
    blocks.check()
    return places


def test_pages_stay_where_they_are_and_the_others_come_back_when_the_step_has_ended():
    blocks = manager()
    decoding(blocks, "a", 10 * BLOCK_SIZE + 5)  # blocks 0..10; the ring begins with 9
    pages = list(blocks.pages("a"))
    places = demoted(blocks, "a", 10 * BLOCK_SIZE + 5, num_slots=4)
    assert places.pages == tuple(pages)
    assert places.slot_pages == tuple(pages[:4])
    assert places.slot_blocks == (0, 1, 2, 3)
    assert places.ring_pages[9 % 3] == pages[9]
    assert places.ring_pages[10 % 3] == pages[10]
    assert places.ring_pages[11 % 3] in pages[4:9], "what the ring's third page held is read before it is written"
    assert places.ring_copies == ()
    assert len(places.host_blocks) == 9
    assert list(blocks.pages("a")) == [*places.slot_pages, *places.ring_pages]
    assert (blocks.num_held, blocks.num_returning) == (7, 4)
    blocks.end_step(1)
    assert blocks.num_available == 32 - 7


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 33, 34, 49, 64, 65])
def test_exactly_the_first_slots_are_filled_while_there_are_fewer_blocks_than_slots(num_tokens):
    blocks = manager()
    decoding(blocks, "a", num_tokens)
    places = demoted(blocks, "a", num_tokens, num_slots=6)
    start = max((num_tokens - 1) // BLOCK_SIZE - 1, 0)
    assert places.slot_blocks == (*range(start), *[-1] * (6 - start))
    assert blocks.num_held == 9


def test_shared_pages_are_let_go_and_their_blocks_are_in_no_slot_yet():
    blocks = manager()
    decoding(blocks, "a", 6 * BLOCK_SIZE + 5)
    decoding(blocks, "b", 10 * BLOCK_SIZE + 5)
    shared = blocks.pages("a")[:6]
    places = demoted(blocks, "b", 10 * BLOCK_SIZE + 5, num_slots=5)
    assert places.slot_blocks == (6, 7, 8, -1, -1)
    assert not set(shared) & {*places.slot_pages, *places.ring_pages}
    assert places.pages[:6] == tuple(shared)
    assert list(blocks.pages("a")[:6]) == list(shared)
    blocks.close("a", 1)
    blocks.end_step(1)
    assert blocks.num_held == 8


def test_a_shared_block_of_the_ring_is_copied():
    blocks = manager()
    decoding(blocks, "a", 4 * BLOCK_SIZE + 5)
    decoding(blocks, "b", 4 * BLOCK_SIZE + 5)
    places = demoted(blocks, "b", 4 * BLOCK_SIZE + 5, num_slots=2)
    assert places.ring_copies == ((blocks.pages("a")[3], places.ring_pages[3 % 3]),)
    assert places.ring_pages[4 % 3] == places.pages[4]


def test_without_pages_for_what_is_missing_nothing_changes():
    blocks = manager(num_pages=6)
    decoding(blocks, "a", 3 * BLOCK_SIZE + 5)
    before = list(blocks.pages("a"))
    assert blocks.num_returned("a", 3 * BLOCK_SIZE + 5, 4) is None
    assert demoted(blocks, "a", 3 * BLOCK_SIZE + 5, num_slots=4) is None
    assert blocks.pages("a") == before
    assert blocks.num_returned("a", 3 * BLOCK_SIZE + 5, 3) == 4 - 6
    assert blocks.num_returned("a", 3 * BLOCK_SIZE + 5, 3, keep=1) is None
    assert demoted(blocks, "a", 3 * BLOCK_SIZE + 5, num_slots=3) is not None


def test_a_sparse_request_keeps_its_pages_however_long_it_grows():
    blocks = manager()
    decoding(blocks, "a", 10 * BLOCK_SIZE)
    demoted(blocks, "a", 10 * BLOCK_SIZE, num_slots=2)
    before = list(blocks.pages("a"))
    assert blocks.grow("a", 30 * BLOCK_SIZE) == []
    blocks.publish("a", tokens_of(30 * BLOCK_SIZE), 12 * BLOCK_SIZE)
    assert blocks.pages("a") == before


def test_blocks_are_told_once_and_not_before_they_are_durable():
    blocks = manager()
    decoding(blocks, "a", 5 * BLOCK_SIZE + 1)
    places = demoted(blocks, "a", 5 * BLOCK_SIZE + 1, num_slots=2)
    assert len(places.host_blocks) == 4
    assert [block for block, _ in blocks.take_stored("a")] == [4]  # it is in the ring, and durable already
    blocks.publish("a", tokens_of(6 * BLOCK_SIZE + 1), 6 * BLOCK_SIZE)
    assert blocks.take_stored("a") == []
    blocks.poll_copies()
    assert [block for block, _ in blocks.take_stored("a")] == [5]
    assert blocks.take_stored("a") == []


def test_the_blocks_of_slots_are_found_in_host_blocks_and_those_given_back_in_their_pages():
    blocks = manager()
    decoding(blocks, "a", 8 * BLOCK_SIZE + 1)
    demoted(blocks, "a", 8 * BLOCK_SIZE + 1, num_slots=2)
    cached = decoding(blocks, "b", 8 * BLOCK_SIZE + 1)
    assert cached.num_tokens == 8 * BLOCK_SIZE
    assert cached.device == 4 * BLOCK_SIZE  # 2..6, but for the one that became the ring's third page


def sparse_history(blocks, num_tokens=8 * BLOCK_SIZE + 1):
    """Somebody who became sparse with 4 full blocks, wrote 4 more, and ended."""
    decoding(blocks, "first", 4 * BLOCK_SIZE + 3)
    demoted(blocks, "first", 4 * BLOCK_SIZE + 3, num_slots=2)
    blocks.publish("first", tokens_of(num_tokens), num_tokens - 1)
    blocks.poll_copies()
    blocks.close("first", 1)
    blocks.end_step(1)
    blocks.end_background(1)


def test_what_was_computed_sparsely_is_found_under_the_same_policy_only():
    blocks = manager()
    sparse_history(blocks)
    tokens = tokens_of(9 * BLOCK_SIZE)
    for policy, num_found in ((b"", 4), (b"other", 4), (POLICY, 8)):
        assert blocks.open("next", tokens, KeyChain(), policy=policy).num_tokens == num_found * BLOCK_SIZE
        blocks.poll_copies()
        blocks.close("next", 1)


def test_what_is_computed_after_such_blocks_is_not_exact_either():
    blocks = manager()
    sparse_history(blocks)
    tokens, chain = tokens_of(10 * BLOCK_SIZE), KeyChain()
    blocks.open("next", tokens, chain, policy=POLICY)
    blocks.poll_copies()
    blocks.publish("next", tokens, 9 * BLOCK_SIZE)
    assert chain.sparse_from == 4
    assert blocks.open("dense", tokens, KeyChain()).num_tokens == 4 * BLOCK_SIZE


def test_exact_blocks_are_taken_before_others():
    blocks = manager()
    sparse_history(blocks)
    decoding(blocks, "dense", 7 * BLOCK_SIZE + 1)
    chain = KeyChain()
    assert blocks.open("next", tokens_of(9 * BLOCK_SIZE), chain, policy=POLICY).num_tokens == 7 * BLOCK_SIZE
    assert chain.sparse_from is None


def test_who_finds_too_few_pages_is_not_taken_for_sparse_later():
    blocks = manager(num_pages=12)
    sparse_history(blocks)
    chain = KeyChain()
    assert blocks.open("next", tokens_of(13 * BLOCK_SIZE), chain, policy=POLICY) is None
    assert chain.sparse_from is None


def test_a_sparse_request_that_gave_way_comes_back_resident_with_all_that_it_had():
    blocks, chain = manager(), KeyChain()
    decoding(blocks, "a", 5 * BLOCK_SIZE + 3, chain)
    demoted(blocks, "a", 5 * BLOCK_SIZE + 3, num_slots=2)
    tokens = tokens_of(7 * BLOCK_SIZE + 9)
    blocks.publish("a", tokens, 7 * BLOCK_SIZE + 8)
    blocks.poll_copies()
    blocks.suspend("a", 7 * BLOCK_SIZE + 8, 2)
    blocks.end_step(2)
    assert blocks.num_returning == 5, "its background pass may use its pages"
    blocks.poll_copies()
    blocks.end_background(2)
    assert blocks.open("a", tokens, chain).num_tokens == len(tokens) - 1
    assert len(blocks.pages("a")) == 8
    blocks.check()


def test_a_row_that_was_to_run_again_is_computed_again_after_a_break():
    blocks, chain = manager(), KeyChain()
    decoding(blocks, "a", 2 * BLOCK_SIZE + 5, chain)
    blocks.suspend("a", 2 * BLOCK_SIZE + 5, 0)  # as if its last token had yielded another
    blocks.poll_copies()
    assert blocks.open("a", tokens_of(2 * BLOCK_SIZE + 5), chain).num_tokens == 2 * BLOCK_SIZE + 4


def test_a_sparse_request_gets_a_host_block_before_those_who_hold_them_for_convenience():
    blocks = manager(num_host_blocks=9)
    decoding(blocks, "sparse", 4 * BLOCK_SIZE + 1)
    demoted(blocks, "sparse", 4 * BLOCK_SIZE + 1, num_slots=2)
    tokens = [7, *tokens_of(8 * BLOCK_SIZE)]
    blocks.open("resident", tokens, KeyChain())
    blocks.publish("resident", tokens, 5 * BLOCK_SIZE)
    blocks.poll_copies()
    assert blocks.num_host_available == 0
    blocks.publish("sparse", tokens_of(6 * BLOCK_SIZE + 1), 6 * BLOCK_SIZE)
    blocks.poll_copies()
    assert blocks.num_durable("sparse") == 6
    assert blocks.num_unstored("resident") == 5
    assert not blocks.secure("resident"), "three of its five are still there"
    assert blocks.num_unstored("resident") == 2
    blocks.check()
