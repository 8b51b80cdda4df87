"""BlockManager: prefixes are found exactly when they should be, and no page is lost or given twice."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from minserve.config import BLOCK_SIZE
from minserve.memory.blocks import BlockManager, blocks_for
from minserve.memory.copies import SyncCopies
from minserve.memory.hashing import KeyChain


def manager(num_pages=8, prefix_caching=True, num_host_blocks=0, secret=b"secret"):
    copies = SyncCopies(lambda copy: None)
    return BlockManager(
        num_pages, secret=secret, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks, copies=copies
    )


def opened(blocks, request_id, tokens, salt=""):
    """Open a request: how many of its tokens were cached, or None."""
    cached = blocks.open(request_id, tokens, KeyChain(salt))
    return None if cached is None else cached.num_tokens


def serve(blocks, request_id, tokens, salt=""):
    """Compute a request and let it go. How many tokens were cached."""
    cached = opened(blocks, request_id, tokens, salt)
    blocks.publish(request_id, tokens, len(tokens))
    blocks.close(request_id, 0)
    return cached


class BlocksMachine(RuleBasedStateMachine):
    """Requests over a two-letter alphabet of blocks, so that prefixes repeat often."""

    NUM_PAGES = 7

    def __init__(self):
        super().__init__()
        self.blocks = manager(self.NUM_PAGES)
        self.open = {}
        self.count = 0
        self.step = 0

    @rule(letters=st.lists(st.booleans(), min_size=1, max_size=5), tail=st.integers(1, BLOCK_SIZE))
    def open_request(self, letters, tail):
        tokens = [int(letter) for letter in letters for _ in range(BLOCK_SIZE)][: -BLOCK_SIZE + tail or None]
        self.count += 1
        request_id = str(self.count)
        before = self.blocks.num_available
        cached = opened(self.blocks, request_id, tokens)
        if cached is None:
            assert self.blocks.num_available == before
            assert blocks_for(len(tokens)) + bool(self.open) > before, "there was room"
            return
        assert cached % BLOCK_SIZE == 0
        assert cached < len(tokens)
        self.open[request_id] = [tokens, cached]

    @rule(data=st.data(), tokens=st.integers(1, 40))
    def grow_and_publish(self, data, tokens):
        if not self.open:
            return
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        known, _ = self.open[request_id]
        longer = known + [2] * tokens
        before = self.blocks.num_available
        need = max(0, blocks_for(len(longer)) - len(self.blocks.pages(request_id)))
        new = self.blocks.grow(request_id, len(longer))
        assert (new is None) == (need > before)
        if new is not None:
            assert len(new) == need
            self.open[request_id][0] = longer
            self.blocks.publish(request_id, longer, len(longer))

    @rule(data=st.data())
    def close_request(self, data):
        if self.open:
            request_id = data.draw(st.sampled_from(sorted(self.open)))
            del self.open[request_id]
            self.step += 1
            self.blocks.close(request_id, self.step)

    @rule()
    def end_steps(self):
        self.blocks.end_step(self.step)
        if not self.open:
            assert self.blocks.num_available == self.NUM_PAGES

    @invariant()
    def holds(self):
        self.blocks.check()


BlocksMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlocksMachine = BlocksMachine.TestCase


def test_a_repeated_prompt_finds_its_full_blocks_but_never_its_last_token():
    blocks = manager()
    tokens = list(range(3 * BLOCK_SIZE))
    assert serve(blocks, "cold", tokens) == 0
    assert serve(blocks, "warm", tokens) == 2 * BLOCK_SIZE
    assert serve(blocks, "longer", [*tokens, 7]) == 3 * BLOCK_SIZE


def test_a_block_is_found_only_after_the_same_blocks_before_it():
    blocks = manager()
    first, second = [1] * BLOCK_SIZE, [2] * BLOCK_SIZE
    serve(blocks, "a", first + second)
    assert serve(blocks, "b", second + second + [0]) == 0


def test_tenants_with_different_salts_share_nothing():
    blocks = manager()
    tokens = list(range(2 * BLOCK_SIZE + 1))
    serve(blocks, "a", tokens, salt="alice")
    assert serve(blocks, "b", tokens, salt="bob") == 0
    assert serve(blocks, "c", tokens, salt="alice") == 2 * BLOCK_SIZE


def test_different_secrets_give_different_keys():
    keys = []
    for secret in (b"one", b"two"):
        own = KeyChain()
        blocks = manager(secret=secret)
        blocks.open("a", list(range(BLOCK_SIZE + 1)), own)
        keys.append(own.keys)
    assert keys[0] != keys[1]


def test_running_requests_share_the_pages_of_a_common_prefix():
    blocks = manager()
    tokens = list(range(2 * BLOCK_SIZE + 3))
    blocks.open("a", tokens, KeyChain())
    blocks.publish("a", tokens, len(tokens))
    blocks.open("b", tokens, KeyChain())
    assert blocks.pages("a")[:2] == blocks.pages("b")[:2]
    assert blocks.pages("a")[2] != blocks.pages("b")[2]
    blocks.close("a", 0)
    blocks.check()


def test_blocks_that_are_not_published_are_not_found():
    blocks = manager()
    tokens = list(range(2 * BLOCK_SIZE + 1))
    blocks.open("a", tokens, KeyChain())
    blocks.publish("a", tokens, BLOCK_SIZE + 3)
    assert opened(blocks, "b", tokens) == BLOCK_SIZE


def test_without_prefix_caching_nothing_is_found():
    blocks = manager(prefix_caching=False)
    tokens = list(range(2 * BLOCK_SIZE + 1))
    serve(blocks, "a", tokens)
    assert serve(blocks, "b", tokens) == 0


def test_a_request_that_would_have_to_give_way_at_its_next_block_is_not_let_in():
    blocks = manager(num_pages=4)
    blocks.open("a", [0] * BLOCK_SIZE, KeyChain())
    assert opened(blocks, "b", [1] * (3 * BLOCK_SIZE)) is None
    assert opened(blocks, "b", [1] * (2 * BLOCK_SIZE)) == 0


def test_a_request_alone_may_take_every_page():
    blocks = manager(num_pages=4)
    assert opened(blocks, "a", [1] * (4 * BLOCK_SIZE)) == 0
    assert blocks.num_available == 0


def test_cleared_prefixes_are_not_found_and_pages_in_use_stay():
    blocks = manager()
    tokens = list(range(2 * BLOCK_SIZE + 1))
    blocks.open("a", tokens, KeyChain())
    blocks.publish("a", tokens, len(tokens))
    blocks.clear_cache()
    blocks.check()
    assert opened(blocks, "b", tokens) == 0
    blocks.close("a", 0)
    blocks.close("b", 0)
    assert blocks.num_available == 8
