"""Sparse requests through the whole engine. With a slot for every block their texts are the dense ones, whatever
happens beside them; with few slots many run where two would fit."""

import random

import pytest

from minserve.config import BLOCK_SIZE
from minserve.protocol import SamplingParams, SparseParams, Submit
from tests.engine.crowd import crowd
from tests.engine.heads import write_head
from tests.engine.tiny import CONFIG, finish, tiny_engine

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 8192}
# With norms of queries and keys, without which all blocks are alike to them.
MODEL = {**CONFIG, **SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
PAGE_BYTES = 3 * 2 * 2 * BLOCK_SIZE * 8 * 4
EVERY_BLOCK = 24
"""Slots for texts of up to 400 tokens, or so."""

NEW = 40
MACHINES = {
    "as it is": {},
    "run-ahead": {"run_ahead": 1},
    "small chunks": {"max_num_batched_tokens": 40},
    "few pages": {"kv_cache_memory": PAGE_BYTES * (2 * EVERY_BLOCK + 20), "max_model_len": 380},
    "few pages, run-ahead": {
        "kv_cache_memory": PAGE_BYTES * (2 * EVERY_BLOCK + 20),
        "max_model_len": 380,
        "run_ahead": 1,
    },
}


def engine(folder, num_slots=None, num_drafts=0, **options):
    """num_slots: None: nobody is sparse."""
    folder.mkdir()
    options = {"kv_cache_memory": PAGE_BYTES * 400, "host_kv": PAGE_BYTES * 800, "max_num_seqs": 8} | options
    if num_slots is None:
        options["sparse"] = "never"
    else:
        options = {"sparse": "above", "working_set_blocks": num_slots} | options
    if num_drafts:
        options |= {"draft_path": str(write_head(folder / "head", hidden=64)), "num_draft_tokens": num_drafts}
    return tiny_engine(folder, MODEL, **options)


def request(name, seed, num_tokens, prefix=(), sparse=None, **params):
    prompt = [*prefix, *(random.Random(seed).randrange(96) for _ in range(num_tokens - len(prefix)))]
    params = SamplingParams(**{"max_tokens": NEW, "temperature": 0.8, "seed": seed, "ignore_eos": True, **params})
    return Submit(request_id=name, prompt_token_ids=prompt, params=params, sparse=sparse)


def traffic():
    """Some begin alike, so that prefixes are found."""
    shared = [random.Random(99).randrange(96) for _ in range(100)]
    sizes = (20, 120, 161, 260)
    return [request(f"r{n}", n, size, shared if size > 100 else ()) for n, size in enumerate(sizes)]


def texts(deltas):
    return {name: [token for delta in own for token in delta.token_ids] for name, own in deltas.items()}


@pytest.fixture(scope="module")
def dense_texts(tmp_path_factory):
    return texts(finish(engine(tmp_path_factory.mktemp("dense") / "engine"), *traffic()))


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("machine", MACHINES)
def test_with_a_slot_for_every_block_texts_are_the_dense_ones(tmp_path, dense_texts, machine, num_drafts):
    own = engine(tmp_path / "engine", EVERY_BLOCK, num_drafts, **MACHINES[machine])
    deltas = finish(own, *traffic())
    assert texts(deltas) == dense_texts
    usages = [own[-1].sparse for own in deltas.values()]
    was_sparse = [usage for usage in usages if usage is not None]
    assert all(usage.surprises == usage.misses == usage.retries == 0 for usage in was_sparse)
    if "few pages" in machine:
        assert was_sparse
        assert own.step().stats.num_preemptions > 0
    else:
        assert len(was_sparse) == len(usages)
    assert texts(finish(own, *traffic())) == dense_texts, "with prefixes from the first time"


def test_with_few_slots_they_are_not_so_that_the_other_tests_could_fail(tmp_path, dense_texts):
    assert texts(finish(engine(tmp_path / "engine", 3, miss_policy="approximate"), *traffic())) != dense_texts


def test_log_probabilities_are_the_dense_ones_too(tmp_path):
    submit = request("a", 4, 170, logprobs=3)
    (dense,), (sparse,) = (
        finish(engine(tmp_path / name, slots), submit).values() for name, slots in (("a", None), ("b", EVERY_BLOCK))
    )
    of_both = zip((e for d in dense for e in d.logprobs), (e for d in sparse for e in d.logprobs), strict=True)
    for one, other in of_both:
        assert one.token_id == other.token_id
        assert abs(one.logprob - other.logprob) < 1e-4


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_neighbours_that_are_aborted_leave_texts_alone(tmp_path, dense_texts, run_ahead):
    own = engine(tmp_path / "engine", EVERY_BLOCK, 3, run_ahead=run_ahead)
    rng, expected = random.Random(1), dense_texts
    for number in range(2):
        others = [request(f"other {number} {n}", 50 + n, rng.randint(5, 300)) for n in range(3)]
        for submit in [*traffic()[1:3], *others]:
            own.submit(submit)
        taken = {submit.request_id: [] for submit in traffic()[1:3]}
        ended = {}
        for step in range(10**6):
            if not own.has_work:
                break
            if step % 7 == 3 and others:
                own.abort(others.pop().request_id)
            for delta in own.step().deltas:
                if delta.request_id in taken:
                    taken[delta.request_id] += delta.token_ids
                    ended[delta.request_id] = delta.finish_reason
            own.check()
        assert taken == {name: expected[name] for name in taken}
        assert set(ended.values()) == {"length"}


def test_sparse_and_resident_requests_run_in_one_batch(tmp_path, dense_texts):
    submits = traffic()
    submits[2] = request("r2", 2, 161, submits[1].prompt_token_ids[:100], SparseParams(mode="never"))
    deltas = finish(engine(tmp_path / "engine", EVERY_BLOCK, 3), *submits)
    assert texts(deltas) == dense_texts
    assert [own[-1].sparse is None for own in deltas.values()] == [name == "r2" for name in deltas]


@pytest.mark.parametrize("miss_policy", ["approximate", "retry", "recall"])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_accounts_add_up(tmp_path, miss_policy, run_ahead):
    own = engine(tmp_path / "engine", 3, 3, miss_policy=miss_policy, run_ahead=run_ahead)
    deltas = finish(own, *traffic())
    usages = [own[-1].sparse for own in deltas.values()]
    stats = own.step().stats
    assert stats.sparse_steps == sum(usage.steps for usage in usages)
    assert stats.bytes_fetched == sum(usage.bytes_fetched for usage in usages) > 0
    head_block = 2 * BLOCK_SIZE * 8 * 4
    for usage, text in zip(usages, texts(deltas).values(), strict=True):
        assert len(text) == NEW
        assert usage.steps - usage.retries <= NEW
        assert usage.bytes_fetched == (usage.misses - usage.cut_misses) * head_block
        assert usage.surprises <= usage.asked
        assert (usage.retries > 0) <= (miss_policy == "retry")
        assert usage.surprises == 0 or miss_policy != "recall"
    assert stats.num_pages_used == 0


def test_many_run_where_two_would_fit(tmp_path):
    """Eight of 500 tokens, 4 blocks each, in pages for two: what is left beside the prompt that is being read holds
    five. (`python -m tests.engine.crowd`: sixteen of 4,096.)"""
    seen = crowd(tmp_path, num_requests=8, num_tokens=500, num_new=NEW, num_slots=4)
    assert seen.most_running >= 6
    assert seen.most_pages <= seen.num_pages
    assert seen.lengths == [NEW] * 8


def test_a_look_at_a_sparse_request_shows_what_it_holds(tmp_path):
    own = engine(tmp_path / "engine", 3, miss_policy="approximate")
    own.submit(request("a", 4, 300, max_tokens=80))
    own.submit(request("b", 5, 30, sparse=SparseParams(mode="never")))
    shown = []
    while own.has_work:
        own.step()
        looked = own.working_set("a")
        assert own.working_set("b") is None
        if looked is not None:
            shown.append(looked)
            row_bytes = -(-looked.num_blocks // 8)
            assert len(looked.held) == len(looked.fetched) == looked.num_layers * looked.num_kv_heads * row_bytes
            for begin in range(0, len(looked.held), row_bytes):
                held, fetched = (
                    int.from_bytes(bits[begin : begin + row_bytes], "little") for bits in (looked.held, looked.fetched)
                )
                assert 3 + 2 <= held.bit_count() <= 3 + 3, "three slots, and the ring"
                assert held & 1, "block 0"
                assert held >> (looked.num_blocks - 1) == 1, "the newest, and none behind it"
                assert fetched & ~held == 0
    assert shown[0].num_blocks == 19
    assert not any(shown[0].fetched), "nothing has been seen before"
    assert any(any(looked.fetched) for looked in shown)
    assert own.working_set("a") is None


def test_a_neighbour_whose_steps_run_again_changes_nothing(tmp_path):
    """With a fixed cap; an adaptive allowance is shared with others, by design."""
    mine = request("mine", 2, 200, (), SparseParams(miss_policy="approximate", fetch="fixed", cap=1))
    others = [request(f"other {n}", 10 + n, 150 + n, (), SparseParams(miss_policy="retry")) for n in range(2)]
    alone = finish(engine(tmp_path / "a", 3), mine)["mine"]
    beside = finish(engine(tmp_path / "b", 3), mine, *others)
    assert sum(own[-1].sparse.retries for own in beside.values()) > 0
    assert texts({"mine": alone}) == texts({"mine": beside["mine"]})
    assert alone[-1].sparse == beside["mine"][-1].sparse


@pytest.mark.parametrize("miss_policy", ["approximate", "retry", "recall"])
def test_the_report_by_layer_adds_up_to_the_totals(tmp_path, miss_policy):
    own = engine(tmp_path / "engine", 3, miss_policy=miss_policy)
    finish(own, *traffic())
    stats = own.step().stats
    _, names, *rows = [line.split() for line in own.report().splitlines()]
    assert names == ["layer", "hits", "misses", "cut", "surprises"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    columns = [sum(map(int, column)) for column in list(zip(*rows))[1:]]
    assert columns == [stats.sparse_hits, stats.sparse_misses, stats.sparse_cut_misses, stats.sparse_surprises]


def test_a_step_runs_again_behind_a_longer_request_that_has_left_the_first_lane(tmp_path):
    """Whose slots still name blocks that nobody in the step ranks. Beside it another, whose step does not."""
    own = engine(tmp_path / "engine", 3, miss_policy="retry")
    longer, shorter = request("longer", 1, 500, max_tokens=4), request("shorter", 2, 120, max_tokens=80)
    other = request("other", 3, 100, sparse=SparseParams(mode="never"), max_tokens=80)
    deltas = finish(own, longer, shorter, other)
    assert deltas["longer"][-1].sparse is not None
    assert deltas["shorter"][-1].sparse.retries > 0
