"""The default model, greedy, gives transformers' tokens, however the engine serves them."""

import pytest
import torch

from minserve import LLM
from minserve.weights.default_model import DEFAULT_HEAD

pytestmark = pytest.mark.slow

PAGE_BYTES = 30 * 3 * 2 * 16 * 64 * 4
TIE = 1e-3
"""Where the two largest logits are closer than this, float32 sums in another order may swap them."""


BFLOAT16_TIE = 0.5
"""Logits here are about 20, where bfloat16 numbers are 0.125 apart; and all before them is rounded, too."""


def assert_same(tokens, reference, tie=TIE):
    expected, gaps = reference
    for position, (token, other) in enumerate(zip(tokens, expected, strict=False)):
        if token != other:
            assert gaps[position] < tie, f"token {position} is {token}, not {other}, with a gap of {gaps[position]}"
            return
    assert len(tokens) == len(expected)


def engine(smollm2, **options):
    return LLM(str(smollm2), dtype="float32", **options)


def assert_all_same(completions, references):
    for completion, reference in zip(completions, references, strict=True):
        assert_same(completion.token_ids, reference)


def test_alone(smollm2, prompts, transformers_outputs):
    llm = engine(smollm2, run_ahead=1, max_num_seqs=1)
    assert_all_same([llm.generate(prompt, max_tokens=64)[0] for prompt in prompts], transformers_outputs)


def test_all_in_one_batch_and_again_with_prefix_hits(smollm2, prompts, transformers_outputs):
    llm = engine(smollm2)
    cold = llm.generate(prompts, max_tokens=64)
    assert all(completion.cached_tokens == 0 for completion in cold)
    warm = llm.generate(prompts, max_tokens=64)
    assert [completion.cached_tokens for completion in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert_all_same(cold, transformers_outputs)
    assert_all_same(warm, transformers_outputs)
    llm.engine.check()


def test_prompts_in_chunks_of_at_most_16_tokens(smollm2, prompts, transformers_outputs):
    llm = engine(smollm2, run_ahead=1, max_num_seqs=8, max_num_batched_tokens=16)
    assert_all_same(llm.generate(prompts, max_tokens=64), transformers_outputs)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_so_few_pages_that_requests_are_preempted(smollm2, prompts, transformers_outputs, run_ahead):
    llm = engine(smollm2, run_ahead=run_ahead, kv_cache_memory=48 * PAGE_BYTES)
    assert_all_same(llm.generate(prompts, max_tokens=64), transformers_outputs)
    assert llm.engine.step().stats.num_preemptions > 0


@pytest.mark.parametrize("prefill_reserve", [0, 320])
def test_preempted_requests_come_back_from_a_host_tier_of_few_blocks(
    smollm2, prompts, transformers_outputs, prefill_reserve
):
    llm = engine(
        smollm2,
        run_ahead=1,
        kv_cache_memory=(48 + prefill_reserve // 16) * PAGE_BYTES,
        host_kv=60 * PAGE_BYTES,
        sparse="never",
        prefill_reserve=prefill_reserve,
    )
    assert_all_same(llm.generate(prompts, max_tokens=64), transformers_outputs)
    assert llm.engine.step().stats.num_preemptions > 0
    llm.engine.check()


def test_prefixes_are_loaded_from_the_host(smollm2, prompts, transformers_outputs):
    llm = engine(smollm2, run_ahead=1, kv_cache_memory=48 * PAGE_BYTES, host_kv=600 * PAGE_BYTES, sparse="never")
    llm.generate(prompts, max_tokens=1)
    warm = llm.generate(prompts, max_tokens=64)
    assert sum(completion.cached_host_tokens for completion in warm) > 100
    assert_all_same(warm, transformers_outputs)


def test_with_drafts_of_the_models_own_head(smollm2, prompts, transformers_outputs):
    """Some chats, code, and a prompt of several blocks."""
    llm = engine(smollm2, draft=str(DEFAULT_HEAD), num_draft_tokens=3, run_ahead=1)
    chosen = [0, 2, 5, 9, 11, 19]
    completions = llm.generate([prompts[number] for number in chosen], max_tokens=64)
    assert_all_same(completions, [transformers_outputs[number] for number in chosen])
    assert sum(completion.accepted_tokens for completion in completions) > 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "run_ahead": 0}], ids=["graphs", "eager"])
def test_in_bfloat16_only_near_ties_are_decided_otherwise(smollm2, prompts, transformers_outputs, options):
    llm = LLM(str(smollm2), dtype="bfloat16", device="cuda", **options)
    for completion, reference in zip(llm.generate(prompts, max_tokens=64), transformers_outputs, strict=True):
        assert_same(completion.token_ids, reference, BFLOAT16_TIE)
