"""What sparse lanes may fetch: no more than all together may, and more for those that lately did without."""

import random

from minserve.engine.allowance import BURST_STEPS, SETTLED_SHARE, Allowance, refills


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
