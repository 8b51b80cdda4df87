"""Scheduler: who runs when. Every test also checks each token against what the request alone would have got."""

import random

import pytest

from minserve.config import BLOCK_SIZE
from minserve.errors import RequestError
from tests.sim.world import END_TOKEN, World, expected_tokens

pytestmark = pytest.mark.parametrize("run_ahead", [0, 1])


def prompt(seed, length):
    return [random.Random(seed * 1000 + length).randrange(1, 50) for _ in range(length)]


def test_one_request_yields_its_tokens_and_leaves_nothing_behind(run_ahead):
    world = World(run_ahead=run_ahead)
    world.submit("a", prompt(1, 20), max_tokens=40, ignore_eos=True)
    world.run()
    assert len(world.outputs["a"]) == 40


def test_an_end_token_ends_the_text_and_is_its_last_token(run_ahead):
    world = World(run_ahead=run_ahead)
    for seed in range(30):
        world.submit(str(seed), prompt(seed, 5), max_tokens=100)
    world.run()
    stopped = [request_id for request_id, reason in world.ends.items() if reason == "stop"]
    assert stopped
    assert all(world.outputs[request_id][-1] == END_TOKEN for request_id in stopped)


def num_read(plan):
    """Tokens of prompts that a step computes."""
    return sum(len(chunk.token_ids) for chunk in plan.chunks)


def test_a_step_computes_no_more_tokens_of_prompts_than_the_budget(run_ahead):
    world = World(num_pages=64, max_num_seqs=8, max_num_batched_tokens=24, run_ahead=run_ahead)
    for seed in range(8):
        world.submit(str(seed), prompt(seed, 70), max_tokens=10)
    world.run()
    assert max(num_read(plan) for plan in world.plans) == 24


def test_decodes_run_in_every_step_beside_a_long_prefill_and_cost_it_no_token(run_ahead):
    world = World(num_pages=64, max_num_batched_tokens=16, run_ahead=run_ahead)
    world.submit("short", prompt(1, 4), max_tokens=30, ignore_eos=True)
    world.step()
    world.submit("long", prompt(2, 200), max_tokens=2)
    while len(world.outputs["short"]) < 10:
        plan = world.step()
        assert len(plan.decodes) == 1
        assert num_read(plan) == 16
    world.run()


def test_the_youngest_gives_way_when_pages_run_out_and_the_oldest_never_does(run_ahead):
    world = World(num_pages=9, max_num_seqs=3, run_ahead=run_ahead)
    for name in ("old", "middle", "young"):
        world.submit(name, prompt(ord(name[0]), 2 * BLOCK_SIZE - 2), max_tokens=5 * BLOCK_SIZE, ignore_eos=True)
    order = []
    while world.has_work:
        world.step()
        order += [name for name in world.ends if name not in order]
    world.verify()
    assert world.scheduler.stats().num_preemptions > 0
    assert order == ["old", "middle", "young"]


def test_a_preempted_request_finds_its_own_blocks_again(run_ahead):
    world = World(num_pages=12, max_num_seqs=2, max_num_batched_tokens=100, run_ahead=run_ahead)
    world.submit("old", prompt(1, 30), max_tokens=100, ignore_eos=True)
    world.submit("young", prompt(2, 40), max_tokens=100, ignore_eos=True)
    world.run()
    assert world.scheduler.stats().num_preemptions == 1
    # It gives way with six blocks; the old one takes three of the twelve pages from it, the last ones first.
    resumed = [chunk.start for plan in world.plans[1:] for chunk in plan.chunks]
    assert resumed == [3 * BLOCK_SIZE]


def test_chunks_end_at_whole_steps_where_the_budget_reaches_one(run_ahead):
    world = World(num_pages=32, max_num_batched_tokens=24, chunk_step=10, run_ahead=run_ahead)
    world.submit("long", prompt(1, 95), max_tokens=2, ignore_eos=True)
    world.run()
    spans = [(chunk.start, chunk.start + len(chunk.token_ids)) for plan in world.plans for chunk in plan.chunks]
    assert spans == [(0, 20), (20, 40), (40, 60), (60, 80), (80, 95)]


def test_a_budget_is_used_where_a_whole_step_would_waste_it(run_ahead):
    world = World(num_pages=32, max_num_batched_tokens=8, chunk_step=10, run_ahead=run_ahead)
    world.submit("long", prompt(1, 27), max_tokens=2, ignore_eos=True)
    world.run()
    ends = [chunk.start + len(chunk.token_ids) for plan in world.plans for chunk in plan.chunks]
    assert ends == [8, 16, 24, 27]


def test_cached_tokens_are_whole_blocks_and_fewer_than_the_prompt(run_ahead):
    world = World(run_ahead=run_ahead)
    world.submit("cold", prompt(1, 2 * BLOCK_SIZE))
    world.run()
    world.submit("warm", prompt(1, 2 * BLOCK_SIZE))
    world.run()
    assert world.cached == {"cold": 0, "warm": BLOCK_SIZE}


def test_a_generated_text_is_found_by_the_next_turn(run_ahead):
    world = World(run_ahead=run_ahead, num_pages=32)
    world.submit("first", prompt(1, 20), max_tokens=30, ignore_eos=True)
    world.run()
    world.submit("second", prompt(1, 20) + world.outputs["first"] + prompt(9, 5))
    world.run()
    # The last sampled token was never an input, so 49 of the 50 tokens have KV: three full blocks.
    assert world.cached["second"] == 3 * BLOCK_SIZE


@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding", "preempted"])
def test_a_request_can_be_aborted_in_every_phase_and_the_others_go_on(run_ahead, phase):
    world = World(num_pages=12, max_num_seqs=3, max_num_batched_tokens=16, run_ahead=run_ahead)
    world.submit("other", prompt(1, 20), max_tokens=100, ignore_eos=True)
    world.submit("victim", prompt(2, 60), max_tokens=60, ignore_eos=True)
    victim = world.scheduler._roster.by_id["victim"]
    reached = {
        "queued": lambda: True,
        "prefilling": lambda: 0 < victim.num_computed < 60,
        "decoding": lambda: victim.num_output_tokens > 3,
        "preempted": lambda: world.scheduler.stats().num_preemptions > 0,
    }[phase]
    while not reached():
        world.step()
    world.abort("victim")
    world.run()
    assert world.ends == {"other": "length", "victim": "abort"}


def test_aborting_an_unknown_or_ended_request_changes_nothing(run_ahead):
    world = World(run_ahead=run_ahead)
    world.submit("a", prompt(1, 5))
    world.abort("nobody")
    world.run()
    world.abort("a")
    assert not world.has_work


def test_a_request_id_can_be_used_again_after_its_end(run_ahead):
    world = World(run_ahead=run_ahead)
    for _ in range(3):
        world.submit("a", prompt(1, 30), max_tokens=9, ignore_eos=True)
        while "a" not in world.ends:
            world.step()
        assert world.outputs["a"] == expected_tokens(world.submitted["a"])
        del world.ends["a"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [50]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 256 - 3 + 1}, "max_tokens"),
        ({"prompt": [1] * 256}, "prompt"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"stop_token_ids": (1,) * 97}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_leaves_nothing(run_ahead, change, param):
    world = World(num_pages=16, run_ahead=run_ahead)
    with pytest.raises(RequestError) as error:
        world.submit("a", **{"prompt": [1, 2, 3], **change})
    assert error.value.param == param
    assert not world.has_work


def test_the_longest_possible_request_finishes_alone(run_ahead):
    world = World(num_pages=16, run_ahead=run_ahead)
    world.submit("a", prompt(1, 200), max_tokens=56, ignore_eos=True)
    world.run()
    assert len(world.outputs["a"]) == 56


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_with_few_pages_gives_everyone_their_own_tokens(run_ahead, seed):
    rng = random.Random(seed)
    world = World(
        num_pages=rng.randint(6, 14),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([5, 16, 17, 64]),
        prefix_caching=rng.random() < 0.8,
        run_ahead=run_ahead,
    )
    longest = world.blocks.num_pages * BLOCK_SIZE
    names = []
    for number in range(25):
        length = rng.choice([1, 15, 16, 17, 31, 32, 33, rng.randint(1, longest - 1)])
        names.append(str(number))
        world.submit(
            names[-1],
            (prompt(rng.randint(1, 2), 40) + prompt(number, 200))[:length],
            max_tokens=rng.randint(1, min(40, longest - length)),
            ignore_eos=rng.random() < 0.5,
            salt=rng.choice(["", "", "other"]),
        )
        for _ in range(rng.choice([0, 0, 1, 5])):
            world.step()
        if rng.random() < 0.2:
            world.abort(rng.choice(names))
    world.run()
