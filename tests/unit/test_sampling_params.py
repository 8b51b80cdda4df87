"""From a request to the engine's parameters: defaults and seeds."""

import pytest

from minserve.api.sampling import choice_seed, sampling_params
from minserve.api.schemas import CompletionRequest, parse
from minserve.protocol import Ready
from minserve.text.tokenizer import SamplingDefaults

INFO = Ready(
    architecture="x", device="cpu", dtype="float32", max_model_len=100, vocab_size=50, num_pages=1, num_host_blocks=0,
    kv_cache_bytes=1,
    weights_bytes=1, max_num_seqs=1,
)  # fmt: skip
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def params_of(defaults=None, **fields):
    request = parse({"prompt": "x"} | fields, CompletionRequest)
    defaults = defaults or SamplingDefaults()
    return sampling_params(request, max_tokens=10, logprobs=None, prompt_logprobs=None, info=INFO, defaults=defaults)


def chosen(params):
    return tuple(getattr(params, name) for name in NAMES)


def test_without_anything_said_the_defaults_are_openais():
    assert chosen(params_of()) == (1.0, 1.0, 0, 0.0, 1.0)


def test_the_models_recommendations_come_before_openais_and_the_requests_before_both():
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    assert chosen(params_of(defaults)) == (0.6, 0.95, 20, 0.1, 1.1)
    request = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert chosen(params_of(defaults, **request)) == (0.0, 1.0, 0, 0.0, 1.0)


def test_top_k_of_minus_one_is_off():
    assert params_of(top_k=-1).top_k == 0


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_no_temperature_to_speak_of_is_greedy(temperature):
    assert params_of(temperature=temperature).temperature == 0.0


def test_without_a_seed_each_request_draws_its_own():
    seeds = {params_of().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_taken_as_it_is():
    assert params_of(seed=42).seed == 42
    assert params_of(seed=-1).seed == 2**63 - 1


def test_the_first_choice_has_the_requests_seed_and_the_others_derive_theirs():
    seeds = [choice_seed(42, choice) for choice in range(128)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**63 for seed in seeds)
