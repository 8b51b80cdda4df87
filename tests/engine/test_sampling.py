"""Sampling options, through the whole engine, on a tiny random model."""

import math
import random

import pytest

from minserve.errors import ConfigError
from minserve.protocol import MAX_MODEL_END_TOKEN_IDS
from tests.engine.tiny import VOCAB, finish, submit, tiny_engine, tokens

PROMPT = [5, 17, 3, 44, 9]


@pytest.fixture(scope="module", params=[0, 1], ids=["", "run-ahead"])
def engine(request, tmp_path_factory):
    return tiny_engine(tmp_path_factory.mktemp("tiny"), run_ahead=request.param, eos_token_ids=(1,))


def joined(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def logprobs_of(engine, prompt):
    """The model's log probabilities after a prompt, by token."""
    deltas = finish(engine, submit("probe", prompt, max_tokens=1, temperature=0.0, logprobs=VOCAB, ignore_eos=True))
    return dict(deltas["probe"][0].logprobs[0].top)


def test_greedy_takes_the_most_likely_token_each_time(engine):
    output = tokens(engine, PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True)
    for position, token in enumerate(output):
        logprobs = logprobs_of(engine, PROMPT + output[:position])
        assert token == max(logprobs, key=logprobs.get)


def test_a_seed_fixes_the_text_and_another_seed_changes_it(engine):
    first = tokens(engine, PROMPT, seed=1, max_tokens=20, ignore_eos=True)
    assert tokens(engine, PROMPT, seed=1, max_tokens=20, ignore_eos=True) == first
    assert tokens(engine, PROMPT, seed=2, max_tokens=20, ignore_eos=True) != first
    assert tokens(engine, PROMPT, seed=1 + 2**40, max_tokens=20, ignore_eos=True) != first


def test_a_seeded_text_does_not_depend_on_its_neighbours(engine):
    options = {"seed": 7, "temperature": 0.9, "top_p": 0.95, "max_tokens": 30, "ignore_eos": True}
    alone = tokens(engine, PROMPT, **options)
    rng = random.Random(0)
    others = [
        submit(f"other-{n}", [rng.randrange(VOCAB) for _ in range(n + 1)], seed=n, top_k=n, max_tokens=25)
        for n in range(6)
    ]
    together = finish(engine, *others[:3], submit("mine", PROMPT, **options), *others[3:])
    assert joined(together["mine"]) == alone


def test_samples_follow_the_models_distribution(engine):
    draws = finish(engine, *[submit(str(seed), PROMPT, seed=seed, max_tokens=1) for seed in range(3000)])
    expected = {token: math.exp(logprob) * 3000 for token, logprob in logprobs_of(engine, PROMPT).items()}
    counts = dict.fromkeys(expected, 0)
    for deltas in draws.values():
        counts[joined(deltas)[0]] += 1
    chi_square = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    assert chi_square < 149  # 95 degrees of freedom, p = .0003


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_the_narrowest_filters_are_greedy(engine, options):
    greedy = tokens(engine, PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True)
    assert tokens(engine, PROMPT, seed=5, max_tokens=12, ignore_eos=True, **options) == greedy


def test_a_bias_forbids_and_forces_tokens(engine):
    greedy = tokens(engine, PROMPT, temperature=0.0, max_tokens=1, ignore_eos=True)[0]
    without = tokens(engine, PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={greedy: -100.0})
    assert greedy not in without
    assert set(tokens(engine, PROMPT, max_tokens=12, ignore_eos=True, logit_bias={60: 100.0})) == {60}


def test_a_bias_is_not_the_neighbours(engine):
    alone = tokens(engine, PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True)
    both = finish(
        engine,
        submit("plain", PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True),
        submit("biased", PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={60: 100.0}),
    )
    assert joined(both["plain"]) == alone
    assert set(joined(both["biased"])) == {60}


def test_presence_penalty_large_enough_never_repeats_what_was_generated(engine):
    output = tokens(engine, PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True, presence_penalty=1000.0)
    assert len(set(output)) == 40


def test_frequency_penalty_evens_out_the_counts(engine):
    output = tokens(engine, PROMPT, temperature=0.0, max_tokens=VOCAB, ignore_eos=True, frequency_penalty=1000.0)
    assert len(set(output)) == VOCAB


def test_repetition_penalty_counts_the_prompt_too(engine):
    prompt = list(range(VOCAB - 1))
    options = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
    logprobs = logprobs_of(engine, prompt)
    assert max(logprobs, key=logprobs.get) != VOCAB - 1
    assert tokens(engine, prompt, repetition_penalty=1e6, logit_bias={VOCAB - 1: 5.0}, **options) == [VOCAB - 1]


def test_penalties_survive_preemption(tmp_path):
    page = 2 * 2 * 2 * 16 * 8 * 4
    options = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "presence_penalty": 1000.0}
    small = tiny_engine(tmp_path, kv_cache_memory=9 * page, max_model_len=128)
    deltas = finish(small, *[submit(str(n), [n + 2] * 20, **options) for n in range(3)])
    assert small.step().stats.num_preemptions > 0
    large = tiny_engine(tmp_path)
    for n in range(3):
        assert joined(deltas[str(n)]) == tokens(large, [n + 2] * 20, **options)


def test_end_tokens_are_not_sampled_before_min_tokens(engine):
    forced = {"logit_bias": {1: 50.0, 7: 40.0}, "temperature": 0.0, "max_tokens": 9}
    assert tokens(engine, PROMPT, **forced) == [1]
    assert tokens(engine, PROMPT, min_tokens=4, **forced) == [7, 7, 7, 7, 1]
    assert tokens(engine, PROMPT, min_tokens=4, stop_token_ids=(7,), **forced)[:4] != [7, 7, 7, 7]


def test_ignore_eos_goes_on_after_the_models_end_tokens_but_not_the_requests(engine):
    forced = {"logit_bias": {1: 50.0}, "temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    assert tokens(engine, PROMPT, **forced) == [1, 1, 1, 1]
    assert tokens(engine, PROMPT, stop_token_ids=(1,), **forced) == [1]


def test_a_stop_token_ends_with_reason_stop_and_names_itself(engine):
    deltas = finish(engine, submit("a", PROMPT, logit_bias={9: 100.0}, stop_token_ids=(9,)))["a"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_id, joined(deltas)) == ("stop", 9, [9])


def test_rows_of_the_vocabulary_that_are_no_tokens_are_never_sampled_nor_reported(tmp_path):
    engine = tiny_engine(tmp_path, token_id_ranges=((0, 40), (50, 60)))
    real = {*range(40), *range(50, 60)}
    hot = tokens(engine, PROMPT, temperature=5.0, seed=3, max_tokens=100, ignore_eos=True)
    assert set(hot) <= real
    biased = tokens(engine, PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True, logit_bias={45: 100.0})
    assert 45 not in biased
    deltas = finish(engine, submit("a", PROMPT, max_tokens=1, logprobs=50))["a"]
    assert {token for token, _ in deltas[0].logprobs[0].top} == real


def test_logprobs_are_the_models_own_whatever_the_sampling(engine):
    plain = finish(engine, submit("a", PROMPT, temperature=0.0, max_tokens=1, logprobs=VOCAB))["a"][0].logprobs[0]
    assert sum(math.exp(logprob) for _, logprob in plain.top) == pytest.approx(1, abs=1e-4)
    assert [logprob for _, logprob in plain.top] == sorted((logprob for _, logprob in plain.top), reverse=True)
    token = plain.top[-1][0]
    options = {"temperature": 0.3, "top_k": 1, "logit_bias": {token: 100.0}, "presence_penalty": 1.0}
    odd = finish(engine, submit("a", PROMPT, max_tokens=1, logprobs=3, **options))["a"][0].logprobs[0]
    assert (odd.token_id, odd.rank, len(odd.top)) == (token, VOCAB, 3)
    assert odd.logprob == pytest.approx(plain.top[-1][1], abs=1e-4)


def test_prompt_logprobs_say_what_each_prompt_token_was_given_by_those_before_it(engine):
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(40)]
    finish(engine, submit("cached before", prompt))
    deltas = finish(engine, submit("a", prompt, max_tokens=2, prompt_logprobs=2, temperature=0.0))["a"]
    entries = deltas[0].prompt_logprobs
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == prompt[1:]
    for position in (1, 2, 17, 39):
        expected = logprobs_of(engine, prompt[:position])[prompt[position]]
        assert entries[position].logprob == pytest.approx(expected, abs=1e-3)
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_prompt_logprobs_are_the_same_each_time_though_the_prompt_is_cached(engine):
    """vllm-project/vllm#42019"""
    prompt = [random.Random(5).randrange(VOCAB) for _ in range(50)]
    first, *others = (
        finish(engine, submit("a", prompt, prompt_logprobs=0, temperature=0.0))["a"][0].prompt_logprobs
        for _ in range(3)
    )
    for again in others:
        assert [entry.logprob for entry in again[1:]] == pytest.approx([e.logprob for e in first[1:]], abs=1e-4)


def test_prompt_logprobs_are_the_same_in_chunks(engine, tmp_path):
    prompt = [random.Random(4).randrange(VOCAB) for _ in range(50)]
    small = tiny_engine(tmp_path, max_num_batched_tokens=7, max_num_seqs=4)
    whole, chunked = (
        finish(each, submit("a", prompt, prompt_logprobs=0, temperature=0.0))["a"][0].prompt_logprobs
        for each in (engine, small)
    )
    assert [entry.logprob for entry in chunked[1:]] == pytest.approx([e.logprob for e in whole[1:]], abs=1e-3)


def test_end_tokens_beyond_the_vocabulary_are_not_looked_at(tmp_path):
    engine = tiny_engine(tmp_path, eos_token_ids=(VOCAB, 10**6))
    assert len(tokens(engine, [1, 2, 3], min_tokens=2, max_tokens=4, temperature=0.0)) == 4


def test_more_end_tokens_than_there_are_places_for_are_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="end tokens"):
        tiny_engine(tmp_path, eos_token_ids=tuple(range(MAX_MODEL_END_TOKEN_IDS + 1)))


def test_the_most_stop_tokens_that_a_client_may_send_fit_beside_the_models_own(tmp_path):
    engine = tiny_engine(tmp_path, eos_token_ids=tuple(range(MAX_MODEL_END_TOKEN_IDS)))
    stops = tuple(range(VOCAB - 1))
    assert len(tokens(engine, [1, 2, 3], stop_token_ids=stops, min_tokens=2, max_tokens=4, temperature=0.0)) >= 2
