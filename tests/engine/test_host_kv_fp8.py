"""Host blocks in 8 bits: what has been there is rounded, what has not is what it was; bytes are those of the link."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.fp8_blocks import dequantize_blocks
from tests.engine.test_sparse_requests import EVERY_BLOCK, NEW, PAGE_BYTES, engine, request, texts, traffic
from tests.engine.test_working_sets import MODEL, PROMPT, check, lab, policy
from tests.engine.test_working_sets import texts_and_logits as lab_texts
from tests.engine.tiny import finish, tiny_engine
from tools.sparse_lab import SparseLab

FP8 = {"host_kv_dtype": "fp8"}


def strangers():
    """Requests that begin in different ways, so that nothing is ever loaded from host blocks."""
    return [request(f"r{n}", n, size) for n, size in enumerate((20, 120, 161, 260))]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_with_a_slot_for_every_block_nothing_is_fetched_and_texts_are_the_dense_ones(tmp_path, num_drafts, run_ahead):
    dense = finish(engine(tmp_path / "dense"), *strangers())
    own = finish(engine(tmp_path / "own", EVERY_BLOCK, num_drafts, run_ahead=run_ahead, **FP8), *strangers())
    assert texts(own) == texts(dense)
    assert all(deltas[-1].sparse.bytes_fetched == 0 for deltas in own.values())


@pytest.mark.parametrize(("num_drafts", "fields"), [(0, {"cap": 1}), (3, {"looks_ahead": True, "num_verified": 2})])
def test_pages_hold_what_the_maps_say_after_every_step(tmp_path, num_drafts, fields):
    _, logits, fetched, _ = lab_texts(lab(tmp_path, 4, num_drafts, **FP8), policy(**fields))
    assert all(torch.isfinite(row).all() for row in logits)
    assert any(step.misses > step.cut for step in fetched)


def test_a_lab_without_an_engine_s_host_blocks_rounds_its_own(tmp_path):
    own = SparseLab(tiny_engine(tmp_path, MODEL, sparse="never", max_num_seqs=1), host_dtype=torch.float8_e4m3fn)
    own.use(4)
    _, _, fetched, _ = lab_texts(own, policy(cap=1))
    assert own.sets.host_scales is not None
    assert any(step.misses > step.cut for step in fetched)


def test_what_was_fetched_is_rounded_and_what_stays_in_a_slot_is_not(tmp_path):
    own = lab(tmp_path, 6, **FP8)
    own.read(PROMPT, 90)
    own.decode(), own.decode()
    before = own.kv[:, : len(PROMPT) // BLOCK_SIZE].clone()
    own.demote(policy(cap=2))
    sets, num_heads, num_fetched, num_kept = own.sets, own.kv.shape[2], 0, 0
    heads = [(layer, head) for layer in range(len(own.kv)) for head in range(num_heads)]
    own.decode()  # demotes, and fetches: from here on it is known what comes when
    held = {each: set(sets.maps.slot_block[each[0], 0, each[1]].tolist()) for each in heads}
    came = {each: set() for each in heads}
    kept = {each: {b for b in held[each] if is_exact(own, each, b, before)} for each in heads}
    for _ in range(60):
        start = int(sets.ring_start[0])
        own.decode()
        check(own)
        for each in heads:
            now = set(sets.maps.slot_block[each[0], 0, each[1]].tolist())
            new = {block for block in now - held[each] if block < start}
            came[each] = (came[each] | new) & now
            kept[each] &= now
            held[each] = now
            for block in came[each]:
                assert torch.equal(page_of(own, each, block), hosted(sets, each, block))
                num_fetched += 1
            for block in kept[each]:
                assert is_exact(own, each, block, before)
                num_kept += 1
    assert min(num_fetched, num_kept) > 100


def page_of(own, where, block):
    """What a (layer, KV head) has of a block in its slot."""
    (layer, head), sets = where, own.sets
    slot = int(sets.maps.block_slot[layer, 0, head, block])
    return sets.kv[layer, int(sets.page_table[0, slot]), head]


def hosted(sets, where, block):
    place = (int(sets.host_table[0, block]), *where)
    return dequantize_blocks(sets.host[place], sets.host_scales[place], sets.kv.dtype)


def is_exact(own, where, block, before):
    return block < before.shape[1] and torch.equal(page_of(own, where, block), before[where[0], block, where[1]])


def test_bytes_fetched_are_those_of_the_link(tmp_path):
    own = engine(tmp_path / "own", 3, **FP8)
    deltas = finish(own, *strangers())
    usages = [deltas[-1].sparse for deltas in deltas.values()]
    head_block_bytes = 2 * BLOCK_SIZE * 8
    for usage in usages:
        assert usage.bytes_fetched == (usage.misses - usage.cut_misses) * head_block_bytes
    stats = own.step().stats
    assert stats.bytes_fetched == sum(usage.bytes_fetched for usage in usages) > 0
    assert stats.bytes_stored > 0
    assert stats.bytes_stored % (3 * 2 * head_block_bytes) == 0


def test_as_much_host_memory_holds_more_blocks(tmp_path):
    plain, own = engine(tmp_path / "plain"), engine(tmp_path / "own", **FP8)
    assert own.info.num_host_blocks == 4 * plain.info.num_host_blocks, "of pages in float32"


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize(("num_slots", "num_pages"), [(None, 40), (EVERY_BLOCK, 2 * EVERY_BLOCK + 20)])
def test_preempted_requests_go_on_with_what_was_rounded(tmp_path, run_ahead, num_slots, num_pages):
    options = {"kv_cache_memory": PAGE_BYTES * num_pages, "max_model_len": 380, "run_ahead": run_ahead}
    own = engine(tmp_path / "own", num_slots, **options, **FP8)
    deltas = finish(own, *traffic())
    assert own.step().stats.num_preemptions > 0
    assert all(len(text) == NEW for text in texts(deltas).values())


def test_a_prefix_from_host_blocks_moves_log_probabilities_a_little(tmp_path):
    own = engine(tmp_path / "own", **FP8)
    asked = [request(name, 7, 200, logprobs=1, temperature=0.0) for name in ("first", "again", "loaded")]
    first, again = (finish(own, submit)[submit.request_id] for submit in asked[:2])
    own._scheduler._blocks.forget_pages()
    loaded = finish(own, asked[2])["loaded"]
    assert (again[0].cached_host_tokens, loaded[0].cached_host_tokens) == (0, 192)
    at_first, at_second, at_third = (deltas[0].logprobs[0].logprob for deltas in (first, again, loaded))
    assert at_second == pytest.approx(at_first, abs=1e-5)
    assert 1e-5 < abs(at_third - at_first) < 0.1
