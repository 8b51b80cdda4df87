"""Pieces of attention over disjoint sets of keys make the attention over all of them."""

import math

import pytest
import torch

from minserve.kernels.merge_attention import (
    TOKENS,
    merge_attention,
    merge_attention_reference,
    merge_attention_triton,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
RUNS = pytest.mark.parametrize("run", [merge_attention_reference, merge_attention_triton])


def random_pieces(device, dtype, pieces, tokens, heads, head_dim):
    outs = torch.randn(pieces, tokens, heads, head_dim, device=device).to(dtype)
    return outs, torch.randn(pieces, heads, tokens, device=device) * 3


def formula(outs, lses):
    """For pieces that all saw a key."""
    lses = lses.double().transpose(1, 2)[..., None]
    return (outs.double() * (lses - lses.logsumexp(dim=0)).exp()).sum(dim=0)


def assert_near(actual, exact, dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@RUNS
def test_merged_pieces_equal_one_softmax_over_all_keys(run, device, dtype):
    tokens, heads, head_dim, cuts = 5, 3, 64, [7, 1, 20]
    q = torch.randn(tokens, heads, head_dim, device=device, dtype=torch.float64)
    k, v = torch.randn(2, sum(cuts), heads, head_dim, device=device, dtype=torch.float64)
    scores = torch.einsum("thd,khd->htk", q, k) / math.sqrt(head_dim)
    outs, lses = [], []
    for part, values in zip(scores.split(cuts, dim=-1), v.split(cuts), strict=True):
        outs.append(torch.einsum("htk,khd->thd", part.softmax(-1), values).to(dtype))
        lses.append(part.logsumexp(-1).float())
    whole = torch.einsum("htk,khd->thd", scores.softmax(-1), v)
    assert_near(run(torch.stack(outs), torch.stack(lses)), whole, dtype)


@RUNS
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 15, 3, 64), (3, 16, 1, 128), (5, 17, 2, 16), (2, 33, 1, 48)])
def test_each_piece_has_the_weight_of_its_own_token_and_head(run, shape, device, dtype):
    outs, lses = random_pieces(device, dtype, *shape)
    assert_near(run(outs, lses), formula(outs, lses), dtype)


@RUNS
def test_a_piece_that_saw_no_key_is_not_looked_at(run, device, dtype):
    outs, lses = random_pieces(device, dtype, 3, TOKENS + 1, 2, 16)
    exact = formula(outs[[0, 2]], lses[[0, 2]])
    lses[1] = -torch.inf
    outs[1] = torch.nan
    assert_near(run(outs, lses), exact, dtype)


@RUNS
def test_where_no_piece_saw_a_key_the_result_is_zero(run, device, dtype):
    outs, lses = random_pieces(device, dtype, 2, 3, 2, 16)
    exact = formula(outs, lses)
    lses[:, 1, 2] = -torch.inf
    outs[:, 2, 1] = torch.nan
    exact[2, 1] = 0
    assert_near(run(outs, lses), exact, dtype)


@RUNS
@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_scores_of_any_size_neither_overflow_nor_vanish(run, size, device, dtype):
    outs, lses = random_pieces(device, dtype, 3, 2, 1, 16)
    lses += size
    assert_near(run(outs, lses), formula(outs, lses), dtype)


def test_tensors_that_do_not_fit_each_other_are_our_mistake(device):
    outs, lses = random_pieces(device, torch.float32, 2, 4, 3, 16)
    for wrong in ((outs, lses.transpose(1, 2)), (outs, lses.double()), (outs[..., ::2], lses), (outs[:1], lses)):
        with pytest.raises(AssertionError):
            merge_attention(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_past_two_billion_elements_are_found(device):
    heads, head_dim = 32, 128
    tokens = 2**31 // (heads * head_dim) + 3
    outs = torch.empty(2, tokens, heads, head_dim, device=device, dtype=torch.bfloat16)
    lses = torch.zeros(2, heads, tokens, device=device)
    outs[:, -1] = torch.randn(2, heads, head_dim, device=device)
    assert_near(merge_attention(outs, lses)[-1], outs[:, -1].double().mean(dim=0), torch.bfloat16)
