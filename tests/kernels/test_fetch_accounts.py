"""What lanes may fetch, and what is counted of it: against loops over lanes, layers and heads."""

import random

import pytest
import torch

from minserve.kernels.fetch_accounts import (
    Accounts,
    count_fetches,
    count_fetches_reference,
    count_fetches_triton,
    count_repeats_reference,
    count_repeats_triton,
    take_given,
    take_given_reference,
    take_given_triton,
)

TAKE = pytest.mark.parametrize("take", [take_given_reference, take_given_triton])
COUNT = pytest.mark.parametrize("count", [count_fetches_reference, count_fetches_triton])
REPEAT = pytest.mark.parametrize("count", [count_repeats_reference, count_repeats_triton])
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
        retried=ints(3, NUM_LANES + 1) == 0,
        late=ints(99, NUM_LANES + 1),
        by_layer=ints(99, layers, 4),
    )


def copy(own):
    return Accounts(*(table.clone() for table in own))


def assert_equal(own, expected):
    """But for nobody's rows."""
    for table, other in zip(own, expected, strict=True):
        assert torch.equal(table[..., :NUM_LANES], other[..., :NUM_LANES])


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
    taken, clock = torch.full((6, len(lanes) + 1), 77, device=device), torch.full_like(step, 77)
    take(given[:, : len(lanes)], own, step, taken[:, :-1], clock)
    for lane in lanes:
        if lane >= 0:
            more = 0 if before.retried[lane] else before.refills[0, lane]
            refilled = (before.allowance[:, lane] + more).minimum(before.refills[1, lane])
            before.allowance[:, lane] = refilled
    assert_equal(own, before)
    clamped = torch.tensor(lanes, device=device).clamp_min(0)
    assert taken[:, :-1].tolist() == [*given[:, : len(lanes)].tolist(), clamped.tolist(), own.cap[clamped].tolist()]
    assert taken[:, -1].tolist() == [77] * 6
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
@pytest.mark.parametrize("recalls", [False, True])
def test_a_step_runs_again_where_more_is_lacking_and_what_it_fetches_is_counted(
    count, layers, heads, lanes, recalls, device
):
    own, counters = accounts(layers, device), counters_of(layers, heads, lanes, device)
    before = copy(own)
    lacking = torch.randint(9, (layers, len(lanes), heads), device=device) / 8
    totals, again = torch.full((len(lanes), 5), 77, device=device), torch.ones(len(lanes), dtype=bool, device=device)
    recalled = torch.randint(9, (len(lanes), 3), device=device) if recalls else None
    ids = torch.tensor(lanes, device=device)
    count(counters.flatten(0, 1), lacking.flatten(0, 1), ids, own, again, totals, recalled)
    for entry, lane in enumerate(lanes):
        expected = counters[:, entry].sum(dim=(0, 1))
        if recalls:
            expected[:3] = recalled[entry]
        runs = False
        if lane >= 0:
            expected[1] += before.late[lane]
            fetched = (counters[:, entry, :, 1] - counters[:, entry, :, 2]).sum(dim=1)
            before.allowance[:, lane] -= fetched
            runs = bool(lacking[:, entry].mean() > before.retry_above[lane]) and not before.retried[lane]
        assert (totals[entry].tolist(), bool(again[entry])) == (expected.tolist(), runs)
    if not recalls:
        before.by_layer.add_(counters[..., :4].sum(dim=(1, 2)))
    assert_equal(own, before)


@REPEAT
@SHAPES
@pytest.mark.parametrize("counts", [False, True])
def test_what_is_fetched_late_waits_for_the_lane_s_next_step(count, layers, heads, lanes, counts, device):
    own, counters = accounts(layers, device), counters_of(layers, heads, lanes, device)
    expected, again = copy(own), torch.arange(len(lanes), device=device) % 2 == 0
    count(counters.flatten(0, 1), torch.tensor(lanes, device=device), own, again, counts=counts)
    fetched = (counters[..., 1] - counters[..., 2]).sum(dim=2)
    for entry, lane in enumerate(lanes):
        if lane >= 0:
            expected.late[lane], expected.retried[lane] = fetched[:, entry].sum(), again[entry]
    if counts:
        expected.by_layer[:, 1] += fetched.sum(dim=1)
    assert_equal(own, expected)


def test_many_lanes_add_up_in_the_same_layers(device):
    torch.manual_seed(random.Random(4).randrange(99))
    lanes = torch.randperm(NUM_LANES, device=device)
    results = []
    own, counters = accounts(36, device), counters_of(36, 8, lanes.tolist(), device)
    for count, repeat in (
        (count_fetches_reference, count_repeats_reference),
        (count_fetches_triton, count_repeats_triton),
    ):
        tables, again = copy(own), torch.zeros(NUM_LANES, dtype=bool, device=device)
        totals = torch.zeros(NUM_LANES, 5, dtype=torch.int64, device=device)
        lacking = torch.zeros(36 * NUM_LANES, 8, device=device)
        count(counters.flatten(0, 1), lacking, lanes, tables, again, totals, None)
        repeat(counters.flatten(0, 1), lanes, tables, again, counts=True)
        results.append([*tables, again, totals])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    own, lanes = accounts(2, device), torch.tensor([0, 1], device=device)
    counters, lacking = torch.zeros(4, 3, 5, dtype=torch.int32, device=device), torch.zeros(4, 3, device=device)
    again, totals = lanes > 5, torch.zeros(2, 5, dtype=torch.int64, device=device)
    for wrong in (
        (counters.long(), lacking, lanes, own, again, totals),
        (counters[:2], lacking, lanes, own, again, totals),
        (counters, lacking[:, :2], lanes, own, again, totals),
        (counters, lacking, lanes, own, again.int(), totals),
        (counters, lacking, lanes, own, again, totals[:, :4]),
    ):
        with pytest.raises(AssertionError):
            count_fetches(*wrong)
    with pytest.raises(AssertionError):
        take_given(torch.zeros(3, 2, dtype=torch.int64, device=device), own, again)
