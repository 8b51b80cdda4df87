"""Sparsity: who becomes sparse and when, and what plans say of it. The world checks each token and all that is read."""

import pytest

from minserve.config import BLOCK_SIZE
from minserve.engine.allowance import BURST_STEPS
from minserve.protocol import SparseParams
from tests.sim.device import HEADS, Link
from tests.sim.sparse_traffic import sparse_rules
from tests.sim.world import World
from tests.unit.test_scheduler import prompt

pytestmark = pytest.mark.parametrize("run_ahead", [0, 1])


def make_world(run_ahead, num_slots=2, rules=None, **options):
    """Pages for some, host blocks for all."""
    values = {"num_pages": 40, "max_num_seqs": 16, "max_num_batched_tokens": 1000, "num_host_blocks": 200} | options
    return World(run_ahead=run_ahead, sparse=sparse_rules(num_slots, **rules or {}), **values)


def submit(world, name, num_prompt, max_tokens=60, **options):
    world.submit(name, prompt(ord(name[-1]), num_prompt), max_tokens=max_tokens, ignore_eos=True, **options)


def demotions(world):
    return [demotion for plan in world.plans for demotion in plan.demotions]


def stats(world):
    return world.scheduler.stats()


def test_while_there_are_pages_nobody_becomes_sparse(run_ahead):
    world = make_world(run_ahead)
    for name in "abc":
        submit(world, name, 100)
    world.run()
    assert demotions(world) == []
    assert not any(plan.keeps_queries for plan in world.plans)


def test_sixteen_requests_run_in_pages_for_two(run_ahead):
    world = make_world(run_ahead, num_pages=130, num_host_blocks=2000)
    for number in range(16):
        submit(world, f"r{number:x}", 60 * BLOCK_SIZE, max_tokens=80)
    world.run()
    assert world.most_running >= 12
    assert world.most_pages <= 130
    assert stats(world).num_preemptions == 0


def test_the_longest_becomes_sparse_for_a_request_that_is_not_let_in(run_ahead):
    world = make_world(run_ahead, num_pages=32)
    submit(world, "a", 100)
    submit(world, "b", 200)
    while not world.outputs.get("b"):
        world.step()
    submit(world, "c", 200)
    while not demotions(world):
        world.step()
    (demotion,) = demotions(world)
    assert demotion.num_tokens > 200
    world.run()
    assert stats(world).num_preemptions == 0


def test_somebody_becomes_sparse_before_anybody_gives_way(run_ahead):
    world = make_world(run_ahead, num_pages=25)
    submit(world, "a", 150, max_tokens=100)
    submit(world, "b", 150, max_tokens=100)
    world.run()
    assert (stats(world).num_demotions, stats(world).num_preemptions) == (1, 0)


def test_with_fewer_pages_than_slots_and_ring_it_is_not_worth_it(run_ahead):
    world = make_world(run_ahead, num_pages=12, num_slots=9)
    submit(world, "a", 60, max_tokens=80)
    submit(world, "b", 60, max_tokens=80)
    world.run()
    assert stats(world).num_demotions == 0
    assert stats(world).num_preemptions > 0


def test_above_a_length_everybody_becomes_sparse_and_nobody_below(run_ahead):
    world = make_world(run_ahead, rules={"mode": "above", "above": 100})
    submit(world, "a", 90, max_tokens=40)
    submit(world, "b", 20, max_tokens=40)
    world.run()
    (demotion,) = demotions(world)
    # Its 101st token makes it longer. It decodes once more, with its queries kept, and rests if steps run ahead.
    assert demotion.num_tokens == 102
    assert world.were_sparse == {"a"}


def test_a_request_may_ask_for_it_or_against_it(run_ahead):
    world = make_world(run_ahead, num_pages=25)
    submit(world, "a", 150, max_tokens=100, sparse=SparseParams(mode="never"))
    submit(world, "b", 150, max_tokens=100)
    submit(world, "c", 20, max_tokens=30, sparse=SparseParams(mode="always"))
    world.run()
    assert world.were_sparse == {"b", "c"}


def test_the_step_before_keeps_queries_and_no_row_is_under_way(run_ahead):
    world = make_world(run_ahead)
    submit(world, "a", 100, sparse=SparseParams(mode="always"))
    world.run()
    when = next(number for number, plan in enumerate(world.plans) if plan.demotions)
    kept = [number for number, plan in enumerate(world.plans) if plan.keeps_queries]
    assert kept == list(range(when - 1, len(world.plans)))
    assert world.plans[when - 1].decodes == world.plans[when].decodes == [world.plans[when].demotions[0].lane]


def test_every_step_of_a_sparse_lane_brings_its_allowance(run_ahead):
    world = make_world(run_ahead, rules={"fetch_ratio": 1.0})
    submit(world, "a", 100, sparse=SparseParams(mode="always"))
    submit(world, "b", 100)
    world.run()
    (demotion,) = demotions(world)
    for plan in world.plans[world.plans.index(next(plan for plan in world.plans if plan.demotions)) :]:
        lanes = [lane for lane in plan.decodes if lane == demotion.lane]
        assert plan.refills == [(lane, 2 * HEADS, 2 * HEADS * BURST_STEPS) for lane in lanes]


def test_each_block_is_told_once_in_order_from_the_ring_on(run_ahead):
    world = make_world(run_ahead)
    submit(world, "a", 100, max_tokens=100, sparse=SparseParams(mode="always"))
    world.run()
    (demotion,) = demotions(world)
    told = [block for plan in world.plans for _, block, _ in plan.stored]
    assert told == list(range(len(demotion.host_blocks), told[-1] + 1))
    assert told[-1] >= (200 - 2) // BLOCK_SIZE - 2


def test_a_slow_link_holds_a_sparse_request_up_and_nothing_else(run_ahead):
    world = make_world(run_ahead, link=Link(max_delay=20, seed=3), num_drafts=3, rules={"has_head": True})
    submit(world, "a", 100, max_tokens=200, sparse=SparseParams(mode="always", verify_drafts=3))
    submit(world, "b", 20, max_tokens=200)
    world.run()
    (demotion,) = demotions(world)
    plans = world.plans[next(number for number, plan in enumerate(world.plans) if plan.demotions) :]
    while demotion.lane not in plans[-1].decodes:
        plans.pop()
    assert sum(demotion.lane not in plan.decodes for plan in plans) > 3
    assert all(len(plan.decodes) >= 1 for plan in plans)


@pytest.mark.parametrize(("num_verified", "lookahead", "fewest"), [(0, "draft", 1), (2, "draft", 3), (0, "current", 0)])
def test_a_draft_is_proposed_behind_those_that_sparse_lanes_verify(run_ahead, num_verified, lookahead, fewest):
    rules = {"has_head": True, "num_verified": num_verified, "lookahead": lookahead}
    world = make_world(run_ahead, num_drafts=3, rules=rules)
    submit(world, "a", 100, sparse=SparseParams(mode="always"))
    world.run()
    when = next(number for number, plan in enumerate(world.plans) if plan.demotions)
    assert min(plan.num_proposals for plan in world.plans[when:]) == fewest
    assert world.plans[when].num_drafts >= fewest


def test_drafts_that_were_never_to_be_verified_are_not_counted(run_ahead):
    world = make_world(run_ahead, num_drafts=3, rules={"has_head": True, "mode": "above"})
    submit(world, "a", 100)
    world.run()
    when = next(number for number, plan in enumerate(world.plans) if plan.demotions)
    before = sum(plan.num_drafts for plan in world.plans[:when] if plan.decodes)
    assert stats(world).num_draft_tokens == before
    assert sum(plan.num_drafts for plan in world.plans[when:]) > 0


def test_rows_that_run_again_yield_their_token_once(run_ahead):
    world = make_world(run_ahead, rules={"miss_policy": "retry"})
    submit(world, "a", 100, max_tokens=100, sparse=SparseParams(mode="always"))
    world.run()
    assert stats(world).sparse_retries > 5
    # One step more for each, and one that is launched before the end is known.
    decoding = sum(bool(plan.decodes) for plan in world.plans)
    assert decoding - 99 - stats(world).sparse_retries in (0, 1)


def test_the_last_delta_says_what_the_working_set_did(run_ahead):
    world = make_world(run_ahead, rules={"miss_policy": "retry", "head_block_bytes": 10})
    submit(world, "a", 100, sparse=SparseParams(mode="always"))
    world.run()
    (demotion,) = demotions(world)
    usage, counters = world.usage["a"], stats(world)
    assert usage.from_token == demotion.num_tokens - 1
    assert (usage.steps, usage.retries) == (counters.sparse_steps, counters.sparse_retries)
    assert usage.bytes_fetched == 10 * (usage.misses - usage.cut_misses) == counters.bytes_fetched
    told = [block for plan in world.plans for _, block, _ in plan.stored]
    own = [block for block in told if block >= usage.from_token // BLOCK_SIZE]
    assert counters.bytes_stored == 10 * HEADS * len(own)


def test_a_sparse_request_that_gives_way_comes_back_and_may_become_sparse_again(run_ahead):
    world = make_world(run_ahead, num_pages=18)
    submit(world, "a", 100, max_tokens=140, sparse=SparseParams(mode="never"))
    submit(world, "b", 150, max_tokens=130, sparse=SparseParams(mode="always"))
    world.run()
    assert stats(world).num_preemptions > 0
    assert len({demotion.num_tokens for demotion in demotions(world)}) > 1


def test_a_prompt_in_the_reserve_leaves_it_by_becoming_sparse(run_ahead):
    world = make_world(run_ahead, num_pages=40, prefill_reserve=20)
    submit(world, "a", 140, max_tokens=100, sparse=SparseParams(mode="never"))
    while not world.outputs.get("a"):
        world.step()
    submit(world, "b", 280, max_tokens=30)
    world.run()
    assert world.were_sparse == {"b"}
    assert stats(world).num_preemptions == 0


def test_too_few_host_blocks_for_a_sparse_request_make_it_resident_again(run_ahead):
    world = make_world(run_ahead, num_host_blocks=9)
    submit(world, "a", 100, max_tokens=200, sparse=SparseParams(mode="always"))
    world.run()
    assert stats(world).num_preemptions == 1
    assert len(demotions(world)) == 1


def test_when_host_blocks_run_out_the_youngest_sparse_request_gives_way(run_ahead):
    world = make_world(run_ahead, num_pages=80, num_host_blocks=24)
    for name in "abc":
        submit(world, name, 100, max_tokens=150, sparse=SparseParams(mode="always" if name != "c" else "never"))
    order = []
    while world.has_work:
        world.step()
        order += [name for name in world.ends if name not in order]
    world.verify()
    assert stats(world).num_preemptions > 0
    assert order.index("a") < order.index("b")


def test_who_will_be_sparse_is_let_in_when_there_are_host_blocks_for_it(run_ahead):
    world = make_world(run_ahead, num_host_blocks=16)
    for name in "ab":
        submit(world, name, 150, max_tokens=40, sparse=SparseParams(mode="always"))
    world.run()
    assert world.most_running == 1
    assert stats(world).num_preemptions == 0


def test_without_a_host_tier_nobody_becomes_sparse(run_ahead):
    world = make_world(run_ahead, num_host_blocks=0, num_pages=25, rules={"mode": "above"})
    submit(world, "a", 150, max_tokens=100)
    submit(world, "b", 150, max_tokens=100)
    world.run()
    assert demotions(world) == []


def test_the_next_turn_finds_what_was_computed_under_its_policy(run_ahead):
    world = make_world(run_ahead, rules={"mode": "above", "above": 0})
    submit(world, "a", 100, max_tokens=100)
    world.run()
    turn = prompt(ord("a"), 100) + world.outputs["a"]
    world.submit("next", [*turn, 7], max_tokens=5, ignore_eos=True)
    world.submit("dense", [*turn, 7], max_tokens=5, ignore_eos=True, sparse=SparseParams(mode="never"))
    world.run()
    assert world.cached["next"] > 150
    assert world.cached["dense"] == 100 // BLOCK_SIZE * BLOCK_SIZE
