"""The torch references against straight transcriptions of their formulas, in float64."""

import math

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.decode_attention import decode_attention, decode_batch
from minserve.kernels.prefill_attention import chunk_mask, masked_attention
from minserve.kernels.sampling import apply_penalties, filter_logits, gumbel_noise


def attend(q, k, v):
    """One query over keys: q [heads, dim], k and v [tokens, kv_heads, dim], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for head in range(q.shape[0]):
        group = head // (q.shape[0] // k.shape[1])
        weights = (k[:, group] @ q[head] / math.sqrt(q.shape[1])).softmax(0)
        out[head] = weights @ v[:, group]
    return out


def batch_of(table, lengths, kv):
    """Lane i of the table has the i-th of as many parts of the lengths."""
    table = torch.tensor(table, dtype=torch.int32)
    return decode_batch(table, torch.arange(len(table)), torch.tensor(lengths), kv)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (6, 2, 16), (9, 3, 64), (4, 1, 128)])
@pytest.mark.parametrize("lengths", [[1, 16, 17, 61], [1, 2, 15, 17, 16, 17, 61, 62], [16, 17, 18]])
def test_decode_attention_reads_each_rows_own_tokens_through_its_page_table(heads, kv_heads, head_dim, lengths):
    kv = torch.randn(32, kv_heads, 2, BLOCK_SIZE, head_dim)
    table = torch.randperm(32)[: 4 * 4].view(4, 4) if len(lengths) != 3 else torch.tensor([[5, 2]])
    q = torch.randn(len(lengths), heads, head_dim)
    out = decode_attention(q, kv, batch_of(table.tolist(), lengths, kv))
    for row, length in enumerate(lengths):
        pages = table[row * len(table) // len(lengths)]
        tokens = kv[pages].permute(2, 0, 3, 1, 4).reshape(2, -1, kv_heads, head_dim)[:, :length]
        torch.testing.assert_close(out[row].double(), attend(q[row], *tokens), atol=1e-5, rtol=1e-5)


def test_tokens_past_a_rows_length_have_no_influence():
    kv = torch.randn(4, 2, 2, BLOCK_SIZE, 8)
    for table, lengths in (([[2, 0]], [20]), ([[2, 0], [3, 1]], [20, 30]), ([[2, 0]], [19, 20])):
        q = torch.randn(len(lengths), 4, 8)
        batch = batch_of(table, lengths, kv)
        before = decode_attention(q, kv, batch)
        kv[0, :, :, 4:] *= 1e4
        torch.testing.assert_close(decode_attention(q, kv, batch), before)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 20), (5, 1), (16, 16), (31, 9)])
def test_prefill_attention_sees_what_comes_before_each_token_and_nothing_after(start, count):
    heads, kv_heads, head_dim = 6, 2, 16
    k, v = torch.randn(2, start + count, kv_heads, head_dim)
    q = torch.randn(count, heads, head_dim)
    mask = chunk_mask(start, count, start + count, torch.device("cpu"))
    out = masked_attention(q, k.transpose(0, 1), v.transpose(0, 1), mask)
    for row in range(count):
        seen = start + row + 1
        torch.testing.assert_close(out[row].double(), attend(q[row], k[:seen], v[:seen]), atol=1e-5, rtol=1e-5)


def seeds(*values):
    return torch.tensor([[value & 0xFFFFFFFF, value >> 32] for value in values])


def test_noise_depends_on_seed_position_and_id_alone():
    one = gumbel_noise(seeds(7), torch.tensor([3]), torch.arange(1000))
    batch = gumbel_noise(seeds(1, 7, 2**63 - 1), torch.tensor([3, 3, 9]), torch.arange(1000))
    assert torch.equal(one[0], batch[1])
    assert not torch.equal(batch[0], batch[1])
    for other in (
        gumbel_noise(seeds(7 + 2**32), torch.tensor([3]), torch.arange(1000)),
        gumbel_noise(seeds(7), torch.tensor([4]), torch.arange(1000)),
    ):
        assert (other == one).float().mean() < 0.01


def test_noise_is_standard_gumbel_and_finite():
    noise = gumbel_noise(seeds(*range(64)), torch.arange(64), torch.arange(4096)).flatten().double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    below = (noise[:, None] <= torch.tensor([-1.0, 0.0, 1.0, 3.0])).double().mean(0)
    torch.testing.assert_close(
        below, torch.exp(-torch.exp(-torch.tensor([-1.0, 0.0, 1.0, 3.0]).double())), atol=0.005, rtol=0
    )


def test_neighbouring_positions_and_ids_are_uncorrelated():
    noise = gumbel_noise(seeds(*[11] * 512), torch.arange(512), torch.arange(512)).double()
    noise = (noise - noise.mean()) / noise.std()
    for shifted in (
        noise.roll(1, 0),
        noise.roll(1, 1),
        noise.roll((1, 1), (0, 1)),
        noise.roll((1, -1), (0, 1)),
        noise.T,
    ):
        assert (noise * shifted).mean().abs() < 0.01


def test_the_largest_sum_of_logits_and_noise_is_a_draw_from_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    draws = (logits + gumbel_noise(seeds(*range(20000)), torch.full((20000,), 5), torch.arange(5))).argmax(-1)
    expected = logits.softmax(0) * 20000
    counts = torch.bincount(draws, minlength=5)
    assert counts[4] == 0
    chi_square = ((counts - expected) ** 2 / expected)[:4].sum().item()
    assert chi_square < 16.27  # 3 degrees of freedom, p = .001


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    out = filter_logits(torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))[0]
    assert all(
        after in (before, -math.inf) for before, after in zip(torch.tensor(logits).tolist(), out.tolist(), strict=True)
    )
    return [index for index, value in enumerate(out.tolist()) if value > -math.inf]


def logits_of(*probs):
    return [math.log(p) for p in probs]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.75}, [0, 1, 3]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.5}, [0, 1, 3]),
        ({"min_p": 0.7}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.99}, [1, 3]),
        ({"top_k": 2, "top_p": 0.5}, [1]),
    ],
)
def test_filters_keep_the_tokens_that_their_definitions_say(options, expected):
    assert kept(logits_of(0.2, 0.4, 0.1, 0.3), **options) == expected


def test_each_row_has_its_own_filter():
    logits = torch.tensor([logits_of(0.2, 0.4, 0.1, 0.3)] * 3)
    out = filter_logits(logits, torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, 0.5]), torch.zeros(3))
    assert out.isfinite().sum(-1).tolist() == [4, 1, 2]


def test_penalties_follow_their_formulas_and_spare_unseen_tokens():
    logits = torch.tensor([[2.0, -2.0, 3.0, 1.0, -1.0]])
    prompt_seen = torch.tensor([[True, True, False, False, False]])
    counts = torch.tensor([[0, 0, 3, 0, 1]], dtype=torch.int32)
    out = apply_penalties(logits, prompt_seen, counts, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25]))
    expected = [2.0 / 2, -2.0 * 2, 3.0 / 2 - 0.5 - 3 * 0.25, 1.0, -1.0 * 2 - 0.5 - 0.25]
    torch.testing.assert_close(out[0], torch.tensor(expected))
