"""Speculation changes how fast a text comes, and nothing else."""

import random

import pytest

from tests.engine.heads import Oracle, write_head
from tests.engine.tiny import VOCAB, finish, submit, tiny_engine

PAGE = 2 * 2 * 2 * 16 * 8 * 4
"""Bytes: 2 layers, 2 KV heads, K and V, 16 tokens, 8 dimensions, float32."""

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 12, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 13, "logit_bias": {7: 6.0, 8: -20.0}, "min_tokens": 20, "stop_token_ids": [7]},
    {"temperature": 0.0, "stop_token_ids": [3, 5, 9, 11, 40, 41, 42, 50, 60, 61]},
]


def traffic():
    rng = random.Random(5)
    common = [rng.randrange(VOCAB) for _ in range(64)]
    for number in range(12):
        prompt = common[: rng.choice([0, 16, 33, 64])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        options = SAMPLING[number % len(SAMPLING)]
        yield submit(str(number), prompt, max_tokens=rng.choice([1, 2, 17, 40]), logprobs=1, **options)


def answers(engine):
    tokens, logprobs = {}, {}
    for request_id, deltas in finish(engine, *traffic()).items():
        tokens[request_id] = [token for delta in deltas for token in delta.token_ids]
        logprobs[request_id] = [(e.token_id, e.logprob) for delta in deltas for e in delta.logprobs or ()]
    return tokens, logprobs


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    for request_id, entries in theirs[1].items():
        assert [token for token, _ in ours[1][request_id]] == theirs[0][request_id]
        assert [value for _, value in ours[1][request_id]] == pytest.approx([value for _, value in entries], abs=1e-4)


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory):
    return answers(tiny_engine(tmp_path_factory.mktemp("model")))


MACHINES = {
    "plain": {},
    "run-ahead": {"run_ahead": 1},
    "small chunks": {"max_num_seqs": 2, "max_num_batched_tokens": 18, "run_ahead": 1},
    "few pages": {"kv_cache_memory": 14 * PAGE, "max_model_len": 128, "run_ahead": 1},
    "few pages and a host tier": {
        "kv_cache_memory": 14 * PAGE,
        "max_model_len": 128,
        "host_kv": 40 * PAGE,
        "run_ahead": 1,
    },
}


def drafting_engine(folder, **options):
    return tiny_engine(folder, draft_path=str(write_head(folder / "head")), **options)


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_texts_and_log_probabilities_are_those_without_drafts(tmp_path, undrafted, machine, num_drafts):
    engine = drafting_engine(tmp_path, num_draft_tokens=num_drafts, **{"max_num_seqs": 6, **machine})
    assert_same(answers(engine), undrafted)
    assert engine._scheduler.stats().num_draft_tokens > 0


@pytest.mark.parametrize("share_right", [1.0, 0.7])
@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_accepted_drafts_are_the_text_itself(tmp_path, undrafted, machine, num_drafts, share_right):
    engine = drafting_engine(tmp_path, num_draft_tokens=num_drafts, **{"max_num_seqs": 6, **machine})
    Oracle(engine, undrafted[0], share_right)
    assert_same(answers(engine), undrafted)
    stats = engine._scheduler.stats()
    assert stats.accepted_at[0] > 0.5 * share_right * stats.num_drafts
    assert stats.accepted_at[num_drafts - 1] > 0
    assert not any(stats.accepted_at[num_drafts:])


def test_right_drafts_make_a_text_of_four_tokens_a_step(tmp_path):
    request = submit("a", list(range(20)), max_tokens=41, temperature=0.0)
    plain = [token for delta in finish(tiny_engine(tmp_path), request)["a"] for token in delta.token_ids]
    engine = drafting_engine(tmp_path, num_draft_tokens=3)
    Oracle(engine, {"a": plain}, share_right=1.0)
    deltas = finish(engine, request)["a"]
    assert [len(delta.token_ids) for delta in deltas] == [1] + [4] * 10
    assert [token for delta in deltas for token in delta.token_ids] == plain


def test_drafts_behind_the_end_of_a_text_are_not_counted_for_it(tmp_path):
    request = submit("a", list(range(20)), max_tokens=3, temperature=0.0)
    plain = [token for delta in finish(tiny_engine(tmp_path), request)["a"] for token in delta.token_ids]
    engine = drafting_engine(tmp_path, num_draft_tokens=8)
    Oracle(engine, {"a": [*plain, *plain, *plain, *plain]}, share_right=1.0)
    last = finish(engine, request)["a"][-1]
    assert len(last.token_ids) == 2
    assert last.accepted_tokens == 2


def test_with_auto_the_number_changes_and_the_texts_do_not(tmp_path, undrafted):
    engine = drafting_engine(tmp_path, run_ahead=1, max_num_seqs=6)
    assert_same(answers(engine), undrafted)
    assert engine._scheduler.stats().num_drafts > 0
