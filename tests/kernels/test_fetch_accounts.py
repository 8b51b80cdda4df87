"""What lanes may fetch, and what is counted of it: against loops over lanes, layers and heads."""

import pytest
import torch

from minserve.kernels.fetch_accounts import (
    SETTLED,
    SOONER,
    UNSETTLED_STEPS,
    Accounts,
    Outcome,
    count_fetches,
    count_fetches_reference,
    count_fetches_triton,
    take_given,
    take_given_reference,
    take_given_triton,
)

TAKE = pytest.mark.parametrize("take", [take_given_reference, take_given_triton])
COUNT = pytest.mark.parametrize("count", [count_fetches_reference, count_fetches_triton])
SHAPES = pytest.mark.parametrize(("layers", "heads", "lanes"), [(1, 1, [0]), (3, 2, [4, -1, 0, 6]), (5, 3, [-1, 2, 1])])
NUM_LANES = 7


def accounts(layers, device):
    def ints(high, *shape):
        return torch.randint(high, shape, device=device)

    return Accounts(
        refills=ints(9, 2, NUM_LANES),
        cap=ints(9, NUM_LANES),
        allowance=ints(9, layers, NUM_LANES).int(),
        retry_above=ints(9, NUM_LANES) / 8,
        since_retry=torch.tensor(
            [0, 3, UNSETTLED_STEPS, UNSETTLED_STEPS + 1, SETTLED], dtype=torch.int32, device=device
        )[ints(5, NUM_LANES)],
        late=ints(99, NUM_LANES + 1),
    )


def copy(own):
    return Accounts(*(table.clone() for table in own))


def assert_equal(own, expected):
    """But for nobody's rows."""
    for table, other in zip(own, expected, strict=True):
        assert torch.equal(table[..., :NUM_LANES], other[..., :NUM_LANES])


def outcome_of(entries, device):
    """To be written."""
    again = torch.ones(entries, dtype=torch.bool, device=device)
    return Outcome(again, torch.full((entries, 5), 77, device=device))


def counters_of(layers, heads, lanes, device):
    """Random, and nothing for who takes no part; no more is cut than is missed."""
    counters = torch.randint(5, (layers, len(lanes), heads, 5), device=device).int()
    counters[..., 1] += counters[..., 2]
    counters[:, torch.tensor(lanes) < 0] = 0
    return counters


@TAKE
@SHAPES
def test_lanes_get_their_refills_up_to_the_most_and_none_for_a_step_that_runs_again(take, layers, heads, lanes, device):
    own = accounts(layers, device)
    before, step = copy(own), torch.tensor([heads], dtype=torch.int32, device=device)
    given = torch.randint(99, (4, len(lanes) + 3), device=device)
    given[0, : len(lanes)] = torch.tensor(lanes, device=device)
    taken, clock = torch.full((7, len(lanes) + 1), 77, device=device), torch.full_like(step, 77)
    take(given[:, : len(lanes)], own, step, taken[:, :-1], clock)
    for lane in lanes:
        if lane >= 0:
            more = 0 if before.since_retry[lane] == 0 else before.refills[0, lane]
            refilled = (before.allowance[:, lane] + more).minimum(before.refills[1, lane])
            before.allowance[:, lane] = refilled
    assert_equal(own, before)
    clamped = [max(lane, 0) for lane in lanes]
    behind = [lane if lane >= 0 else NUM_LANES for lane in lanes]
    assert taken[:, :-1].tolist() == [*given[:, : len(lanes)].tolist(), clamped, behind, own.cap[clamped].tolist()]
    assert taken[:, -1].tolist() == [77] * 7
    assert clock.tolist() == [heads]


def test_what_is_taken_begins_at_16_bytes_for_any_number_of_entries(device):
    own, step = accounts(2, device), torch.ones(1, dtype=torch.int32, device=device)
    given = torch.full((4, 4), -1, device=device)
    for entries in (1, 2, 3):
        taken, clock = take_given(given[:, :entries], own, step)
        assert all(row.data_ptr() % 16 == 0 for row in taken)
        assert clock.tolist() == [1]


@COUNT
@SHAPES
def test_a_step_runs_again_where_more_is_lacking_and_what_it_fetches_is_counted(count, layers, heads, lanes, device):
    own, counters = accounts(layers, device), counters_of(layers, heads, lanes, device)
    before = copy(own)
    lacking = torch.randint(9, (layers, len(lanes), heads), device=device) / 8
    again, totals = outcome = outcome_of(len(lanes), device)
    count(counters, lacking, torch.tensor(lanes, device=device), own, outcome)
    for entry, lane in enumerate(lanes):
        expected = counters[:, entry].sum(dim=(0, 1))
        runs = False
        if lane >= 0:
            expected[1] += before.late[lane]
            fetched = (counters[:, entry, :, 1] - counters[:, entry, :, 2]).sum(dim=1)
            before.allowance[:, lane] -= fetched
            since = int(before.since_retry[lane])
            above = before.retry_above[lane] * (SOONER if since <= UNSETTLED_STEPS else 1)
            runs = bool(lacking[:, entry].mean() > above) and since > 0
            before.since_retry[lane] = 0 if runs else min(since + 1, SETTLED)
        assert (totals[entry].tolist(), bool(again[entry])) == (expected.tolist(), runs)
    assert_equal(own, before)


@COUNT
def test_the_mean_is_over_all_layers_and_heads_of_a_large_model(count, device):
    own, lanes = accounts(36, device), torch.tensor([3, 5], device=device)
    own.retry_above.fill_(0.5), own.since_retry.fill_(SETTLED)
    lacking = torch.full((36, 2, 8), 0.5, device=device)
    lacking[35, 1, 7] = 0.75
    counters, (again, totals) = counters_of(36, 8, [3, 5], device), (outcome := outcome_of(2, device))
    own.late.zero_()
    count(counters, lacking, lanes, own, outcome)
    assert again.tolist() == [False, True]
    assert torch.equal(totals, counters.sum(dim=(0, 2)))


@COUNT
def test_a_lane_that_ran_again_does_so_sooner_for_some_steps_and_never_twice_running(count, device):
    own, lanes = accounts(2, device), torch.tensor([1, 4], device=device)
    own.retry_above.fill_(0.5), own.since_retry.fill_(SETTLED)
    seen = []
    # 0.2 is above 0.3 * 0.5 alone. The second lane never lacks as much as would unsettle it.
    for lacks in (0.2, 0.6, 0.6, 0.2, 0.1, *[0.0] * 4, 0.2, 0.2, *[0.0] * 5, 0.2, 0.2, *[0.0] * 6, 0.2):
        lacking = torch.tensor([lacks, min(lacks, 0.2)], device=device).repeat(2, 3, 1).transpose(1, 2).contiguous()
        counters, outcome = torch.zeros(2, 2, 3, 5, dtype=torch.int32, device=device), outcome_of(2, device)
        count(counters, lacking, lanes, own, outcome)
        seen.append(outcome.again.tolist())
    assert [step for step, (first, _) in enumerate(seen) if first] == [1, 3, 9, 16]
    assert not any(second for _, second in seen)
    assert own.since_retry[[1, 4]].tolist() == [8, SETTLED]


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    own, lanes = accounts(2, device), torch.tensor([0, 1], device=device)
    counters, lacking = torch.zeros(2, 2, 3, 5, dtype=torch.int32, device=device), torch.zeros(2, 2, 3, device=device)
    again, totals = outcome = outcome_of(2, device)
    for wrong in (
        (counters.long(), lacking, lanes, own, outcome),
        (counters[:1], lacking[:1], lanes, own, outcome),
        (counters, lacking[..., :2], lanes, own, outcome),
        (counters, lacking, lanes, own, Outcome(again.int(), totals)),
        (counters, lacking, lanes, own, Outcome(again, totals[:, :4])),
    ):
        with pytest.raises(AssertionError):
            count_fetches(*wrong)
    with pytest.raises(AssertionError):
        take_given(torch.zeros(3, 2, dtype=torch.int64, device=device), own, again)
