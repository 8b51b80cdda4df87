"""What sparse lanes may fetch: no more than all together may, and more for those that lately did without."""

import random

import pytest

from minserve.engine.allowance import BURST_STEPS, LINK_SHARE, SETTLED_SHARE, Allowance, LinkBudget, refills


def test_a_fixed_lane_gets_the_same_in_every_step_and_saves_nothing():
    lane = Allowance(base=12, fixed=True)
    lane.note(1000)
    assert refills([lane]) == [(12, 12)]


def test_lanes_that_miss_nothing_get_their_average_and_may_save_a_burst():
    lanes = [Allowance(base, fixed=False) for base in (12, 24)]
    assert refills(lanes) == [(12, 12 * BURST_STEPS), (24, 24 * BURST_STEPS)]


def test_a_lane_alone_gets_its_average_whatever_it_misses():
    lane = Allowance(base=12, fixed=False)
    lane.note(1000)
    assert refills([lane]) == [(12, 12 * BURST_STEPS)]


def test_a_lane_that_did_without_gets_what_settled_ones_can_spare():
    lanes = [Allowance(base=12, fixed=False) for _ in range(4)]
    lanes[2].note(50)
    assert [blocks for blocks, _ in refills(lanes)] == [6, 6, 6 + 24, 6]


def test_what_was_missed_is_forgotten():
    lanes = [Allowance(base=12, fixed=False) for _ in range(2)]
    lanes[0].note(80)
    for _ in range(100):
        lanes[0].note(0)
        lanes[1].note(1)
    assert [blocks for blocks, _ in refills(lanes)] == [6, 6 + 12 - 1]  # what is left of it rounds down


def test_all_together_never_get_more_than_their_averages_and_nobody_less_than_its_settled_share():
    rng = random.Random(0)
    for _ in range(300):
        lanes = [Allowance(rng.randint(1, 50), fixed=False) for _ in range(rng.randint(1, 20))]
        for lane in lanes:
            lane.note(rng.choice([0, 0, 1, 1000]))
        shares = refills(lanes)
        assert sum(blocks for blocks, _ in shares) <= sum(lane.base for lane in lanes)
        for lane, (blocks, most) in zip(lanes, shares, strict=True):
            assert int(SETTLED_SHARE * lane.base) <= blocks <= most == BURST_STEPS * lane.base


def test_fixed_lanes_do_not_live_off_others():
    adaptive, fixed = Allowance(base=12, fixed=False), Allowance(base=12, fixed=True)
    adaptive.note(100)
    assert refills([adaptive, fixed]) == [(12, 12 * BURST_STEPS), (12, 12)]


def test_a_link_that_carries_less_leaves_less_for_all_but_fixed_lanes():
    lanes = [Allowance(base=12, fixed=False) for _ in range(4)]
    assert [blocks for blocks, _ in refills(lanes, most=24)] == [6, 6, 6, 6]
    assert refills(lanes, most=48) == refills(lanes, most=1000) == refills(lanes)
    lanes[2].note(50)
    assert [blocks for blocks, _ in refills(lanes, most=24)] == [3, 3, 3 + 12, 3]
    with_fixed = refills([*lanes, Allowance(base=12, fixed=True)], most=36)
    assert [blocks for blocks, _ in with_fixed] == [3, 3, 3 + 12, 3, 12], "the link carries what fixed ones take too"
    assert {saved for _, saved in with_fixed[:4]} == {6 * BURST_STEPS}
    assert [blocks for blocks, _ in refills(lanes, most=0)] == [1, 1, 1, 1], "nobody is shut out for ever"


def test_the_link_s_budget_is_what_it_carries_in_most_of_a_step():
    assert LinkBudget(None).most(10) is None
    budget = LinkBudget(blocks_s=1000.0)
    assert budget.most(10) is None, "before any step"
    budget.note(2.0)
    assert budget.most(10) == int(LINK_SHARE * 1000 * 2 / 10)


@pytest.mark.parametrize(("wanted", "computes_s"), [(5000, 0.020), (500, 0.020), (50_000, 0.004)])
@pytest.mark.parametrize("slower", [1.0, 1.1])
def test_steps_end_up_waiting_for_nothing_that_is_fetched(wanted, computes_s, slower):
    """Of lanes that take all that they may. Until then a step takes what its fetches take, which are slower beside a
    step than alone."""
    budget, num_layers, taken_s = LinkBudget(blocks_s=6e6), 36, 0.1
    for _ in range(400):
        budget.note(taken_s)
        blocks = min(wanted, budget.most(num_layers))
        taken_s = max(computes_s, slower * blocks * num_layers / budget.blocks_s)
    assert taken_s == computes_s
    assert blocks == min(wanted, int(LINK_SHARE * 6e6 * budget.seconds / num_layers))
    assert budget.seconds == pytest.approx(computes_s, rel=1e-3)


def test_one_long_step_says_little_of_the_next_ones():
    budget = LinkBudget(blocks_s=1000.0)
    budget.note(1.0)
    budget.note(100.0)
    assert budget.seconds == pytest.approx(1 + 0.25 / 8)
