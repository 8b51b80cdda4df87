"""Bias, barred end tokens and penalties, lane by lane; and the counts that penalties need."""

from dataclasses import replace

import pytest
import torch

from minserve.kernels.adjust_logits import (
    Adjustments,
    adjust_logits_reference,
    adjust_logits_triton,
    apply_penalties,
    count_tokens_reference,
    count_tokens_triton,
)


def make_adjustments(device, num_lanes, vocab):
    random = torch.Generator().manual_seed(0)
    state = Adjustments(
        num_tokens=torch.full((num_lanes,), 10),
        min_position=torch.zeros(num_lanes, dtype=torch.int64),
        end_ids=torch.full((num_lanes, 3), -1),
        bias_ids=torch.full((num_lanes, 5), -1),
        bias=torch.full((num_lanes, 5), torch.nan),
        repetition=torch.ones(num_lanes),
        presence=torch.zeros(num_lanes),
        frequency=torch.zeros(num_lanes),
        prompt_seen=torch.rand(num_lanes, vocab, generator=random) < 0.3,
        output_counts=torch.randint(-3, 4, (num_lanes, vocab), generator=random).clamp_min(0).int(),
        drafts=torch.full((num_lanes, 4), -1),
        constrained=torch.zeros(num_lanes, dtype=torch.bool),
        allowed=torch.zeros(num_lanes, 5, -(-vocab // 32), dtype=torch.int32),
    )
    return Adjustments(**{name: getattr(state, name).to(device) for name in Adjustments.__slots__})


@pytest.mark.parametrize("vocab", [17, 128, 4100])
def test_every_lane_has_its_own_adjustments(vocab, device, dtype):
    state = make_adjustments(device, 6, vocab)
    logits = (3 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))).to(device, dtype)
    logits[:, 5] = -torch.inf
    state.bias_ids[1, :3], state.bias[1, :3] = torch.tensor([0, 16, 5]), torch.tensor([4.0, -100.0, 1.0])
    state.end_ids[2, 1:] = torch.tensor([3, 9])
    state.min_position[2] = 11
    state.repetition[3], state.presence[4], state.frequency[4] = 1.7, 0.5, 0.25
    # Lane 5 has everything: a bias that turns a logit positive before the penalty, and an end token that has a bias.
    state.repetition[5], state.presence[5], state.frequency[5] = 0.6, -0.5, 1.5
    state.bias_ids[5], state.bias[5] = torch.tensor([2, 4, 7, 8, 9]), torch.tensor([30.0, -30.0, 2.0, 0.5, 99.0])
    state.end_ids[5, 0], state.min_position[5] = 9, 11

    lanes = torch.tensor([5, 0, 3, 1, 4, 2], device=device)
    expected = torch.empty(6, vocab, device=device, dtype=torch.float64)
    for row, lane in enumerate(lanes.tolist()):
        x = logits[row].double()
        for id, bias in zip(state.bias_ids[lane].tolist(), state.bias[lane].tolist(), strict=True):
            if id >= 0:
                x[id] += bias
        if lane in (2, 5):
            x[state.end_ids[lane][state.end_ids[lane] >= 0]] = -torch.inf
        own = slice(lane, lane + 1)
        penalties = (state.repetition[own], state.presence[own], state.frequency[own])
        expected[row] = apply_penalties(x[None], state.prompt_seen[own], state.output_counts[own], *penalties)[0]
    for adjust in (adjust_logits_triton, adjust_logits_reference):
        out = adjust(logits, lanes, state)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rows_per_entry", [2, 4])
def test_a_row_is_adjusted_as_if_the_drafts_before_it_were_output(rows_per_entry, device, dtype):
    vocab = 40
    state = make_adjustments(device, 3, vocab)
    # Token 3 twice, and 2 has a bias; the text is long enough from its third row on.
    state.drafts[2] = torch.tensor([3, 2, 3, 7])
    state.drafts[0] = torch.tensor([-1, 5, -1, -1])
    state.repetition[2], state.presence[2], state.frequency[2] = 1.7, 0.5, 0.25
    state.frequency[0] = 3.0
    state.bias_ids[2, :2], state.bias[2, :2] = torch.tensor([2, 9]), torch.tensor([4.0, -1.0])
    state.end_ids[2, :2], state.min_position[2] = torch.tensor([1, 9]), 12
    lanes = torch.tensor([2, -1, 0, 1], device=device)
    random = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(4 * rows_per_entry, vocab, generator=random)).to(device, dtype)
    # What the step of one row would be given when these drafts have been output.
    expected = torch.empty(4 * rows_per_entry, vocab, device=device)
    for j in range(rows_per_entry):
        counts = state.output_counts.clone()
        for lane in range(3):
            for token in state.drafts[lane, :j].tolist():
                counts[lane, token] += token >= 0
        then = replace(state, output_counts=counts, num_tokens=state.num_tokens + j)
        expected[j::rows_per_entry] = adjust_logits_reference(logits[j::rows_per_entry].contiguous(), lanes, then)
    assert expected[:rows_per_entry, 1].isinf().tolist() == [j < 2 for j in range(rows_per_entry)]
    real = (lanes >= 0).repeat_interleave(rows_per_entry)
    for adjust in (adjust_logits_triton, adjust_logits_reference):
        torch.testing.assert_close(adjust(logits, lanes, state)[real], expected[real], rtol=1e-6, atol=1e-6)


def test_a_row_that_asks_for_nothing_is_only_converted_and_padding_is_skipped(device, dtype):
    state = make_adjustments(device, 2, 20)
    state.repetition[0], state.min_position[0], state.end_ids[0, 0] = 2.0, 11, 1
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    lanes = torch.tensor([-1, 1], device=device)
    for adjust in (adjust_logits_triton, adjust_logits_reference):
        assert torch.equal(adjust(logits, lanes, state)[1], logits[1].float())


@pytest.mark.parametrize("rows_per_entry", [1, 3])
@pytest.mark.parametrize("vocab", [17, 64, 4100])
def test_what_a_grammar_does_not_allow_is_out_whatever_else_is_asked_for(vocab, rows_per_entry, device, dtype):
    state = make_adjustments(device, 3, vocab)
    random = torch.Generator().manual_seed(2)
    kept = torch.rand(5, vocab, generator=random) < 0.5
    kept[:, :4] = torch.tensor([True, False, True, False])
    bits = torch.zeros(5, -(-vocab // 32) * 32, dtype=torch.int64)
    bits[:, :vocab] = kept
    words = (bits.view(5, -1, 32) << torch.arange(32)).sum(dim=2)
    state.constrained[1] = True
    state.allowed[1] = words.to(torch.int32)  # the highest bit is the sign
    state.repetition[:2], state.frequency[:2] = 1.7, -0.5
    state.bias_ids[:2, :2], state.bias[:2, :2] = torch.tensor([1, 2]), torch.tensor([100.0, 3.0])
    state.drafts[1, :2] = torch.tensor([2, 0])
    logits = torch.randn(3 * rows_per_entry, vocab, generator=random).to(device, dtype)
    lanes = torch.tensor([1, 0, -1], device=device)
    free = replace(state, constrained=torch.zeros_like(state.constrained))
    for adjust in (adjust_logits_triton, adjust_logits_reference):
        (bound, other, _), (expected, others, _) = (
            adjust(logits, lanes, each).view(3, rows_per_entry, vocab) for each in (state, free)
        )
        assert torch.equal(other, others)
        assert torch.equal(bound, expected.masked_fill(~kept[:rows_per_entry].to(device), -torch.inf))


@pytest.mark.parametrize("count", [count_tokens_triton, count_tokens_reference])
def test_tokens_are_counted_for_lanes_with_penalties_alone(count, device):
    counts = torch.zeros(4, 9, dtype=torch.int32, device=device)
    counts[3, 8] = 5
    penalized = torch.tensor([True, True, False, True], device=device)
    expected = counts.clone()
    expected[1, 2], expected[3, 8] = 1, 6
    tokens, lanes = torch.tensor([2, 8, 7, 4], device=device), torch.tensor([1, 3, 2, -1], device=device)
    count(tokens, lanes, torch.tensor([1, 1, 1, 0], device=device), counts, penalized)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("count", [count_tokens_triton, count_tokens_reference])
@pytest.mark.parametrize("rows_per_entry", [2, 4])
def test_an_entry_s_tokens_are_counted_as_far_as_they_were_accepted(count, rows_per_entry, device):
    entries = 67  # more rows than one program counts
    tokens = torch.randint(0, 3, (entries * rows_per_entry,), device=device)
    lanes = torch.randperm(entries, device=device)
    lanes[5::9] = -1
    accepted = torch.randint(1, rows_per_entry + 1, (entries,), device=device)
    counts = torch.zeros(entries, 4, dtype=torch.int32, device=device)
    penalized = torch.arange(entries, device=device) % 7 > 0
    expected = counts.clone()
    for entry, lane in enumerate(lanes.tolist()):
        for token in tokens[entry * rows_per_entry :][: accepted[entry]].tolist():
            expected[lane, token] += lane >= 0 and bool(penalized[lane])
    count(tokens, lanes, accepted, counts, penalized)
    assert torch.equal(counts, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tables_beyond_two_to_the_31_elements(device):
    lanes, vocab = 8200, 262_144
    counts = torch.zeros(lanes, vocab, dtype=torch.int32, device=device)
    last = torch.tensor([lanes - 1], device=device)
    tokens = torch.tensor([vocab - 2, vocab - 1], device=device)
    count_tokens_triton(tokens, last, torch.ones_like(last), counts, counts[:, 0] == 0)
    assert counts[-1, -3:].tolist() == [0, 1, 0]
    state = make_adjustments(device, 1, 8)
    tables = {name: getattr(state, name).expand(lanes, *getattr(state, name).shape[1:]).contiguous()
              for name in Adjustments.__slots__ if name not in ("prompt_seen", "output_counts", "allowed")}  # fmt: skip
    seen = torch.zeros(lanes, vocab, dtype=torch.bool, device=device)
    allowed = torch.zeros(lanes, 5, vocab // 32, dtype=torch.int32, device=device)
    state = Adjustments(prompt_seen=seen, output_counts=counts, allowed=allowed, **tables)
    state.frequency[-1] = 3.0
    state.drafts[-1, 0] = vocab - 1
    out = adjust_logits_triton(torch.ones(2, vocab, device=device), last, state)
    assert out[:, -3:].tolist() == [[1.0, -2.0, 1.0], [1.0, -2.0, -2.0]]
