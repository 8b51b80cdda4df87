"""The host tier through BlockManager: what is written through, found, loaded, saved and let go."""

import random

from minserve.config import BLOCK_SIZE
from minserve.memory.blocks import BlockManager
from minserve.memory.copies import Copy, DelayedCopies, SyncCopies
from minserve.memory.hashing import KeyChain
from tests.sim.world import Link, World


class Recorder:
    """A mover that remembers."""

    def __init__(self):
        self.copies: list[Copy] = []

    def __call__(self, copy):
        self.copies.append(copy)


def tier(num_pages=8, num_host_blocks=8, fate=None):
    moved = Recorder()
    copies = SyncCopies(moved) if fate is None else DelayedCopies(moved, fate)
    blocks = BlockManager(
        num_pages, secret=b"secret", prefix_caching=True, num_host_blocks=num_host_blocks, copies=copies
    )
    return blocks, moved


def compute(blocks, request_id, tokens):
    cached = blocks.open(request_id, tokens, KeyChain())
    blocks.publish(request_id, tokens, len(tokens))
    return cached


def tokens_of(seed, num_blocks, extra=1):
    return [random.Random(seed).randrange(1000) for _ in range(num_blocks * BLOCK_SIZE + extra)]


def fill_pages(blocks, seed):
    """Let another request take every page, so that only the host tier remembers what was in them."""
    others = tokens_of(seed, blocks.num_pages - 1, extra=BLOCK_SIZE)
    assert blocks.open("filler", others, KeyChain()) is not None
    blocks.close("filler", 0)


def test_full_blocks_are_written_through_once_and_the_last_one_is_not():
    blocks, moved = tier()
    tokens = tokens_of(1, 2, extra=5)
    compute(blocks, "a", tokens)
    compute(blocks, "b", tokens)
    assert [(copy.kind, copy.page) for copy in moved.copies] == [("store", page) for page in blocks.pages("a")[:2]]


def test_a_prefix_without_pages_is_loaded_from_the_blocks_it_was_stored_in():
    blocks, moved = tier()
    tokens = tokens_of(1, 3)
    compute(blocks, "a", tokens)
    blocks.close("a", 0)
    blocks.poll_copies()
    fill_pages(blocks, 2)
    stores = {copy.host for copy in moved.copies}
    moved.copies.clear()
    cached = blocks.open("b", tokens, KeyChain())
    assert (cached.device, cached.host) == (0, 3 * BLOCK_SIZE)
    assert [copy.kind for copy in moved.copies] == ["load"] * 3
    assert {copy.host for copy in moved.copies} == stores
    assert [copy.page for copy in moved.copies] == list(blocks.pages("b")[:3])


def test_a_block_is_not_found_before_its_copy_has_been_seen_to_end():
    blocks, _ = tier(fate=lambda copy: (2 if copy.kind == "store" else 1, True))
    tokens = tokens_of(1, 2)
    compute(blocks, "a", tokens)
    blocks.close("a", 0)
    blocks.forget_pages()
    assert blocks.open("early", tokens, KeyChain()).num_tokens == 0
    blocks.close("early", 0)
    blocks.poll_copies()
    blocks.poll_copies()
    assert blocks.open("late", tokens, KeyChain()).host == 2 * BLOCK_SIZE


def test_a_page_with_a_copy_in_flight_is_not_free():
    blocks, _ = tier(num_pages=4, fate=lambda copy: (2, True))
    compute(blocks, "a", tokens_of(1, 2))
    blocks.close("a", 0)
    assert (blocks.num_available, blocks.num_returning) == (2, 2)
    assert blocks.open("b", tokens_of(2, 3), KeyChain()) is None
    blocks.poll_copies()
    blocks.poll_copies()
    assert blocks.open("b", tokens_of(2, 3), KeyChain()) is not None


def test_requests_with_one_prefix_wait_for_one_load():
    blocks, moved = tier(num_pages=12, fate=lambda copy: (1 if copy.kind == "store" else 3, True))
    tokens = tokens_of(1, 3)
    compute(blocks, "a", tokens)
    blocks.poll_copies()
    blocks.close("a", 0)
    blocks.forget_pages()
    blocks.open("b", tokens, KeyChain())
    blocks.open("c", tokens, KeyChain())
    assert blocks.pages("b")[:3] == blocks.pages("c")[:3]
    assert not blocks.is_ready("b")
    assert not blocks.is_ready("c")
    for _ in range(3):
        blocks.poll_copies()
    assert blocks.is_ready("b")
    assert blocks.is_ready("c")
    assert [copy.kind for copy in moved.copies].count("load") == 3


def test_a_failed_load_is_reported_for_all_who_wait_and_its_block_is_not_found_again():
    blocks, _ = tier(num_pages=12, fate=lambda copy: (1, copy.kind == "store"))
    tokens = tokens_of(1, 3)
    compute(blocks, "a", tokens)
    blocks.poll_copies()
    blocks.close("a", 0)
    blocks.forget_pages()
    blocks.open("b", tokens, KeyChain())
    blocks.open("c", tokens, KeyChain())
    assert blocks.poll_copies() == ["b", "c"]
    blocks.close("b", 0)
    blocks.close("c", 0)
    assert blocks.open("b", tokens, KeyChain()).num_tokens == 0
    blocks.check()


def test_a_suspended_request_comes_back_with_all_that_it_had_computed():
    blocks, moved = tier(num_pages=5)
    tokens = tokens_of(1, 2, extra=6)
    compute(blocks, "a", tokens)
    blocks.poll_copies()
    blocks.suspend("a", len(tokens) - 1, 0)
    blocks.poll_copies()
    fill_pages(blocks, 2)
    moved.copies.clear()
    assert blocks.open("a", tokens, KeyChain()).num_tokens == len(tokens) - 1
    assert [copy.kind for copy in moved.copies] == ["load"] * 3
    blocks.poll_copies()
    blocks.close("a", 0)
    assert blocks.num_host_held == 0
    blocks.check()


def test_what_a_suspended_request_keeps_is_not_evicted_by_others():
    blocks, _ = tier(num_pages=5, num_host_blocks=3)
    tokens = tokens_of(1, 2, extra=6)
    compute(blocks, "a", tokens)
    blocks.poll_copies()
    blocks.suspend("a", len(tokens) - 1, 0)
    blocks.poll_copies()
    for seed in (2, 3, 4):
        compute(blocks, f"other-{seed}", tokens_of(seed, 3))
        blocks.poll_copies()
        blocks.close(f"other-{seed}", 0)
    assert blocks.open("a", tokens, KeyChain()).num_tokens == len(tokens) - 1


def test_if_host_blocks_run_out_the_one_suspended_first_loses_its_own():
    blocks, _ = tier(num_pages=8, num_host_blocks=1)
    for name in ("first", "second"):
        compute(blocks, name, tokens_of({"first": 1, "second": 2}[name], 0, extra=6))
        blocks.suspend(name, 5, 0)
        blocks.poll_copies()
    blocks.check()
    assert blocks.open("second", tokens_of(2, 0, extra=6), KeyChain()).num_tokens == 5
    assert blocks.open("first", tokens_of(1, 0, extra=6), KeyChain()).num_tokens == 0


def test_what_was_kept_of_an_aborted_request_is_let_go():
    blocks, _ = tier()
    compute(blocks, "a", tokens_of(1, 2, extra=6))
    blocks.suspend("a", 2 * BLOCK_SIZE + 5, 0)
    blocks.forget("a")
    blocks.poll_copies()
    assert blocks.num_host_held == 0
    blocks.check()


def test_the_end_of_a_sequence_is_given_up_before_its_beginning():
    blocks, _ = tier(num_pages=12, num_host_blocks=6)
    first, second = tokens_of(1, 4), tokens_of(2, 4)
    for name, tokens in (("first", first), ("second", second)):
        compute(blocks, name, tokens)
        blocks.poll_copies()
        blocks.close(name, 0)
    blocks.forget_pages()
    assert blocks.open("first", first, KeyChain()).host == 2 * BLOCK_SIZE
    assert blocks.open("second", second, KeyChain()).host == 4 * BLOCK_SIZE


def test_a_prompt_larger_than_the_tier_keeps_its_beginning():
    blocks, _ = tier(num_pages=12, num_host_blocks=4)
    tokens = tokens_of(1, 10)
    blocks.open("a", tokens, KeyChain())
    for num_tokens in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE):
        blocks.publish("a", tokens, num_tokens)
        blocks.poll_copies()
    blocks.close("a", 0)
    blocks.forget_pages()
    assert blocks.open("b", tokens, KeyChain()).host == 4 * BLOCK_SIZE


def test_a_running_request_has_its_host_blocks_when_it_has_to_give_way():
    blocks, _ = tier(num_pages=8, num_host_blocks=4)
    tokens = tokens_of(1, 2, extra=6)
    compute(blocks, "a", tokens)
    for seed in (2, 3, 4):
        compute(blocks, "other", tokens_of(seed, 3))
        blocks.poll_copies()
        blocks.close("other", 0)
    blocks.suspend("a", len(tokens) - 1, 0)
    blocks.poll_copies()
    blocks.forget_pages()
    assert blocks.open("a", tokens, KeyChain()).num_tokens == len(tokens) - 1


def test_a_cleared_cache_has_nothing_that_was_on_its_way():
    blocks, _ = tier(num_pages=12, fate=lambda copy: (2, True))
    tokens = tokens_of(1, 2)
    compute(blocks, "a", tokens)
    blocks.close("a", 0)
    blocks.clear_cache()
    compute(blocks, "b", tokens)
    blocks.close("b", 0)
    blocks.forget_pages()
    blocks.poll_copies()
    blocks.poll_copies()
    blocks.check()
    assert blocks.open("c", tokens, KeyChain()).host == 2 * BLOCK_SIZE, "what was computed later is found"
    blocks.close("c", 0)
    blocks.clear_cache()
    assert blocks.open("d", tokens, KeyChain()).num_tokens == 0


def test_a_request_waits_in_its_lane_while_its_prefix_is_loaded_and_others_go_on():
    world = World(num_pages=12, num_host_blocks=20, link=Link(max_delay=1))
    prompt = [3] * (4 * BLOCK_SIZE + 1)
    world.submit("cold", prompt, max_tokens=2, ignore_eos=True)
    world.run()
    world.blocks.forget_pages()
    world.submit("warm", prompt, max_tokens=2, ignore_eos=True)
    world.run()
    assert (world.cached["warm"], world.cached_host["warm"]) == (4 * BLOCK_SIZE, 4 * BLOCK_SIZE)
    assert sum(len(chunk.token_ids) for chunk in world.plans[-2].chunks) == 1
