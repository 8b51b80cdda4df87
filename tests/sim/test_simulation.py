"""A thousand seeds break no rule, and every planted bug is found within as many."""

import pytest

import tests.sim.draft_bugs
import tests.sim.sparse_bugs  # noqa: F401 (they register themselves)
from tests.sim.bugs import BUGS, planted
from tests.sim.simulation import make_scenario, shrink, simulate, violation

NUM_SEEDS = 1000
KEPT = ()
"""Seeds that once failed."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 100))
def test_no_rule_is_broken(first):
    for seed in range(first, first + 100):
        scenario = make_scenario(seed)
        wrong = violation(scenario)
        if wrong is not None:
            pytest.fail(f"{wrong}\nreplay: python -m tests.sim --seed {seed}\nshrunk: {shrink(scenario)}")


@pytest.mark.slow
@pytest.mark.parametrize("rule", BUGS)
def test_a_planted_bug_is_found(rule, record_property, capsys):
    with planted(rule):
        found = next((seed for seed in range(NUM_SEEDS) if violation(make_scenario(seed)) is not None), None)
    with capsys.disabled():
        print(f"\n{rule}: found after {'no' if found is None else found + 1} seeds", end="")
    assert found is not None
    assert violation(make_scenario(found)) is None, "the seed fails without the bug too"


def test_scenarios_reach_what_they_are_for():
    preemptions = loads = shared = aborts = resumed = accepted = rejected = 0
    for seed in range(150):
        world = simulate(make_scenario(seed))
        preemptions += world.scheduler.stats().num_preemptions
        loads += sum(count or 0 for count in world.cached_host.values())
        shared += sum(count or 0 for count in world.cached.values())
        aborts += sum(reason == "abort" for reason in world.ends.values())
        resumed += sum(chunk.start % 16 != 0 for plan in world.plans for chunk in plan.chunks)
        accepted += sum(world.scheduler.stats().accepted_at)
        rejected += world.scheduler.stats().num_draft_tokens
    assert min(preemptions, loads, shared, aborts, resumed, accepted, rejected - accepted) > 20


def test_a_scenario_is_the_same_every_time():
    assert make_scenario(7) == make_scenario(7)
    assert simulate(make_scenario(7)).outputs == simulate(make_scenario(7)).outputs


def test_a_failing_scenario_is_shrunk_to_the_requests_that_matter():
    with planted("a block counts as full one token early"):
        scenarios = (make_scenario(seed) for seed in range(NUM_SEEDS))
        scenario = next(s for s in scenarios if len(s.request_ids) > 5 and violation(s) is not None)
        smaller = shrink(scenario)
        assert violation(smaller) is not None
        assert len(smaller.request_ids) < len(scenario.request_ids)
        assert all(violation(smaller.without(request_id)) is None for request_id in smaller.request_ids)


def test_seeds_that_once_failed():
    for seed in KEPT:
        simulate(make_scenario(seed))
