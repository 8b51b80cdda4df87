"""Tokens drawn on the device are those that the formula says, whatever rows share a launch."""

import pytest
import torch

from minserve.kernels.sampling import (
    SamplingState,
    filter_logits,
    gumbel_noise,
    sample,
    sample_reference,
    sample_triton,
)


def make_state(device, num_lanes, **tables):
    random = torch.Generator().manual_seed(3)
    state = {
        "temperature": torch.ones(num_lanes),
        "top_p": torch.ones(num_lanes),
        "min_p": torch.zeros(num_lanes),
        "top_k": torch.zeros(num_lanes, dtype=torch.int64),
        "seed": torch.randint(2**32, (num_lanes, 2), generator=random),
        "last_token": torch.full((num_lanes,), -7),
        "num_tokens": torch.arange(num_lanes) + 5,
    }
    for name, table in tables.items():
        state[name] = torch.as_tensor(table, dtype=state[name].dtype).expand(num_lanes).clone()
    return SamplingState(**{name: table.to(device) for name, table in state.items()})


def draw(logits, lanes, state, allowed=None):
    """By small tiles, so that a row of 40 takes several parts and several reads."""
    return sample_triton(logits, lanes, state, allowed, tile=16, cut_tile=32)


def test_greedy_takes_the_lowest_id_among_the_best(device, dtype):
    logits = torch.zeros(4, 40, device=device, dtype=dtype)
    logits[1, [39, 17]] = 2.0
    logits[2] = -torch.inf
    logits[2, 33] = -5.0
    logits[3, :39] = -torch.inf
    logits[3, 39] = torch.finfo(dtype).min
    state = make_state(device, 4, temperature=0.0)
    assert draw(logits, torch.arange(4, device=device), state).tolist() == [0, 17, 33, 39]


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33])
def test_every_size_of_vocabulary_is_read_to_its_end(vocab, device, dtype):
    logits = torch.arange(vocab, device=device).to(dtype)[None]
    assert draw(logits, torch.tensor([0], device=device), make_state(device, 1, temperature=0.0)).tolist() == [
        vocab - 1
    ]


def test_rows_of_all_kinds_in_one_launch_draw_what_the_reference_draws(device, dtype):
    options = {
        "temperature": [1.0, 0.0, 0.5, 0.7, 0.0, 1.5, 1.0],
        "top_k": [0, 0, 3, 0, 3, 0, 20],
        "top_p": [1.0, 1.0, 1.0, 0.6, 0.5, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.05],
    }
    logits = (2 * torch.randn(7, 40, generator=torch.Generator().manual_seed(1))).to(device, dtype)
    lanes = torch.tensor([4, 0, 6, -1, 2, 1, 5], device=device)
    allowed = torch.ones(40, dtype=torch.bool, device=device)
    allowed[logits.float().topk(3).indices[0]] = False
    state, expected = make_state(device, 7, **options), make_state(device, 7, **options)
    tokens = draw(logits, lanes, state, allowed)
    assert torch.equal(tokens, sample_reference(logits, lanes, expected, allowed))
    assert tokens[3] == 0
    assert torch.equal(state.last_token, expected.last_token)
    assert torch.equal(state.num_tokens, expected.num_tokens)


def test_the_token_goes_to_its_lane_and_padding_touches_nothing(device):
    logits = torch.zeros(3, 20, device=device)
    logits[0, 11], logits[1, 12], logits[2, 13] = 1.0, 1.0, 1.0
    state = make_state(device, 4, temperature=0.0)
    assert draw(logits, torch.tensor([2, -1, 0], device=device), state).tolist() == [11, 0, 13]
    assert state.last_token.tolist() == [13, -7, 11, -7]
    assert state.num_tokens.tolist() == [6, 6, 8, 8]


def test_the_reference_is_the_formula(device):
    options = {"temperature": 0.8, "top_k": [0, 5, 0], "top_p": [1.0, 1.0, 0.7], "min_p": 0.01}
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).to(device)
    state = make_state(device, 3, **options)
    noise = gumbel_noise(state.seed, state.num_tokens, 50)
    expected = (filter_logits(logits / 0.8, state.top_k, state.top_p, state.min_p) + noise).argmax(-1)
    assert torch.equal(sample_reference(logits, torch.arange(3, device=device), state), expected)


def test_the_wrapper_takes_the_path_of_the_device(device, dtype):
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    lanes, options = torch.tensor([1, 0], device=device), {"temperature": [0.0, 0.8], "top_k": 50, "top_p": 0.9}
    tokens = sample(logits, lanes, make_state(device, 2, **options))
    assert torch.equal(tokens, sample_triton(logits, lanes, make_state(device, 2, **options)))


def test_draws_follow_the_softmax(device):
    # In the interpreter a draw takes 20 ms; how the formula is distributed is tested with many in tests/unit.
    rows = 50_000 if device.type == "cuda" else 300
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -torch.inf, 0.0, 2.5, -0.5, 1.0], device=device)
    state = make_state(device, rows, temperature=0.9)
    tokens = draw(logits.expand(rows, 11).contiguous(), torch.arange(rows, device=device), state)
    counts = torch.bincount(tokens, minlength=11).double()
    expected = (logits.double() / 0.9).softmax(0) * rows
    assert counts[6] == 0
    others = torch.arange(11, device=device) != 6
    chi_square = ((counts - expected)[others] ** 2 / expected[others]).sum().item()
    assert chi_square < 27.88  # 9 degrees of freedom, p = .001


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_beyond_two_to_the_31_elements(device):
    rows, vocab = 8200, 262_144
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=device)
    targets = torch.arange(rows, device=device) * 31
    logits[torch.arange(rows, device=device), targets] = 100.0
    state = make_state(device, rows, temperature=0.0)
    state.temperature[-1], state.top_k[-1] = 1.0, 50
    assert torch.equal(sample_triton(logits, torch.arange(rows, device=device), state), targets)
