"""Tokens drawn on the device are those that the formula says, whatever rows share a launch."""

import pytest
import torch

from minserve.kernels.sampling import (
    SamplingState,
    draw,
    draw_reference,
    draw_triton,
    filter_logits,
    gumbel_noise,
)


def make_state(device, num_lanes, **tables):
    random = torch.Generator().manual_seed(3)
    state = {
        "temperature": torch.ones(num_lanes),
        "top_p": torch.ones(num_lanes),
        "min_p": torch.zeros(num_lanes),
        "top_k": torch.zeros(num_lanes, dtype=torch.int64),
        "seed": torch.randint(2**32, (num_lanes, 2), generator=random),
        "num_tokens": torch.arange(num_lanes) + 5,
    }
    for name, table in tables.items():
        state[name] = torch.as_tensor(table, dtype=state[name].dtype).expand(num_lanes).clone()
    return SamplingState(**{name: table.to(device) for name, table in state.items()})


def tiled(logits, lanes, state, allowed=None, **options):
    """By small tiles, so that a row of 40 takes several parts and several reads."""
    return draw_triton(logits, lanes, state, allowed, **options, tile=16, cut_tile=32)


def test_greedy_takes_the_lowest_id_among_the_best(device, dtype):
    logits = torch.zeros(4, 40, device=device, dtype=dtype)
    logits[1, [39, 17]] = 2.0
    logits[2] = -torch.inf
    logits[2, 33] = -5.0
    logits[3, :39] = -torch.inf
    logits[3, 39] = torch.finfo(dtype).min
    state = make_state(device, 4, temperature=0.0)
    assert tiled(logits, torch.arange(4, device=device), state).tolist() == [0, 17, 33, 39]


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33])
def test_every_size_of_vocabulary_is_read_to_its_end(vocab, device, dtype):
    logits = torch.arange(vocab, device=device).to(dtype)[None]
    state = make_state(device, 1, temperature=0.0)
    assert tiled(logits, torch.tensor([0], device=device), state).tolist() == [vocab - 1]


@pytest.mark.parametrize(("rows_per_entry", "filtered"), [(1, True), (2, False), (4, True)])
def test_rows_of_all_kinds_in_one_launch_draw_what_the_reference_draws(rows_per_entry, filtered, device, dtype):
    options = {
        "temperature": [1.0, 0.0, 0.5, 0.7, 0.0, 1.5, 1.0],
        "top_k": [0, 0, 3, 0, 3, 0, 20],
        "top_p": [1.0, 1.0, 1.0, 0.6, 0.5, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.05],
    }
    random = torch.Generator().manual_seed(1)
    logits = (2 * torch.randn(7 * rows_per_entry, 40, generator=random)).to(device, dtype)
    lanes = torch.tensor([4, 0, 6, -1, 2, 1, 5], device=device)
    allowed = torch.ones(40, dtype=torch.bool, device=device)
    allowed[logits.float().topk(3).indices[0]] = False
    state = make_state(device, 7, **options)
    tokens = tiled(logits, lanes, state, allowed, filtered=filtered)
    assert torch.equal(tokens, draw_reference(logits, lanes, state, allowed, filtered=filtered))
    assert tokens.view(7, rows_per_entry)[3].eq(0).all()


@pytest.mark.parametrize("run", [tiled, draw_reference])
@pytest.mark.parametrize("rows_per_entry", [2, 4])
def test_each_row_of_an_entry_draws_by_its_lane_at_a_position_of_its_own(run, rows_per_entry, device, dtype):
    options = {"temperature": [0.9, 0.0, 1.2], "top_k": [0, 0, 5], "top_p": [0.9, 1.0, 1.0]}
    logits = torch.randn(3 * rows_per_entry, 40, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    lanes = torch.tensor([2, 0, 1], device=device)
    tokens = run(logits, lanes, make_state(device, 3, **options))
    for j in range(rows_per_entry):
        later = make_state(device, 3, **options, num_tokens=torch.arange(3) + 5 + j)
        one = logits[j::rows_per_entry].contiguous()
        assert tokens[j::rows_per_entry].tolist() == draw_reference(one, lanes, later).tolist()


@pytest.mark.parametrize("run", [tiled, draw_reference])
def test_a_row_may_be_about_a_position_further_ahead(run, device, dtype):
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    lanes, later = torch.tensor([1, 0], device=device), make_state(device, 2, num_tokens=torch.arange(2) + 5 + 3)
    tokens = run(logits, lanes, make_state(device, 2), ahead=3)
    assert tokens.tolist() == draw_reference(logits, lanes, later).tolist()


@pytest.mark.parametrize("run", [tiled, draw_reference])
def test_a_draft_head_s_columns_are_drawn_with_the_noise_of_the_tokens_they_stand_for(run, device, dtype):
    ids = torch.arange(40, device=device) * 3 + 2
    id_offsets = ids - torch.arange(40, device=device)
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    logits[3] = 0.0
    lanes = torch.tensor([2, -1, 0, 1], device=device)
    allowed = torch.arange(40, device=device) % 5 > 0
    # The filters would leave nothing but the best, and are left out.
    state = make_state(device, 3, temperature=[1.0, 0.0, 1.5], top_k=1)
    # The same in the target's vocabulary, where all other tokens are out of the question.
    whole = torch.full((4, 130), -torch.inf, device=device, dtype=dtype)
    whole[:, ids] = logits.masked_fill(~allowed, -torch.inf)
    tokens = run(logits, lanes, state, allowed, ahead=2, id_offsets=id_offsets, filtered=False)
    assert torch.equal(tokens, draw_reference(whole, lanes, state, ahead=2, filtered=False))
    assert tokens[[1, 3]].tolist() == [0, ids[1].item()]


@pytest.mark.parametrize("run", [tiled, draw_reference])
def test_of_equal_columns_the_lower_wins_whatever_ids_they_stand_for(run, device):
    id_offsets = torch.arange(39, -1, -1, device=device) - torch.arange(40, device=device)
    state = make_state(device, 1, temperature=0.0)
    logits, lanes = torch.zeros(1, 40, device=device), torch.tensor([0], device=device)
    logits[0, [7, 30]] = 1.0
    assert run(logits, lanes, state, id_offsets=id_offsets).tolist() == [32]


def test_the_reference_is_the_formula(device):
    options = {"temperature": 0.8, "top_k": [0, 5, 0], "top_p": [1.0, 1.0, 0.7], "min_p": 0.01}
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).to(device)
    state = make_state(device, 3, **options)
    noise = gumbel_noise(state.seed, state.num_tokens, torch.arange(50, device=device))
    expected = (filter_logits(logits / 0.8, state.top_k, state.top_p, state.min_p) + noise).argmax(-1)
    assert torch.equal(draw_reference(logits, torch.arange(3, device=device), state), expected)


def test_the_wrapper_takes_the_path_of_the_device(device, dtype):
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    lanes, options = torch.tensor([1, 0], device=device), {"temperature": [0.0, 0.8], "top_k": 50, "top_p": 0.9}
    state = make_state(device, 2, **options)
    assert torch.equal(draw(logits, lanes, state), draw_triton(logits, lanes, state))
    assert torch.equal(draw(logits, lanes, state, ahead=3), draw_triton(logits, lanes, state, ahead=3))
    with pytest.raises(AssertionError):
        draw(logits[:1], lanes, state)


def test_draws_follow_the_softmax(device):
    # In the interpreter a draw takes 20 ms; how the formula is distributed is tested with many in tests/unit.
    rows = 50_000 if device.type == "cuda" else 300
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -torch.inf, 0.0, 2.5, -0.5, 1.0], device=device)
    state = make_state(device, rows, temperature=0.9)
    tokens = tiled(logits.expand(rows, 11).contiguous(), torch.arange(rows, device=device), state)
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
    for rows_per_entry in (1, 2):
        entries = rows // rows_per_entry
        state = make_state(device, entries, temperature=0.0)
        state.temperature[-1], state.top_k[-1] = 1.0, 50
        assert torch.equal(draw_triton(logits, torch.arange(entries, device=device), state), targets)
