"""The prefill reserve: a full machine starts the next prompt, and nobody else is disturbed by it or disturbs it."""

import pytest

from minserve.config import BLOCK_SIZE
from tests.sim.world import World

pytestmark = pytest.mark.parametrize("run_ahead", [0, 1])


def full_world(run_ahead, **options):
    """Sixteen pages, eight of them the reserve; two requests that have all the others."""
    world = World(num_pages=16, prefill_reserve=8, num_host_blocks=30, run_ahead=run_ahead, **options)
    world.submit("a", [5] * 3 * BLOCK_SIZE, max_tokens=60, ignore_eos=True)
    world.submit("b", [6] * 3 * BLOCK_SIZE, max_tokens=30, ignore_eos=True)
    while not world.outputs["b"]:
        world.step()
    return world


def preemptions(world):
    return world.scheduler.stats().num_preemptions


def test_a_prompt_that_has_no_room_beside_the_others_starts_at_once(run_ahead):
    world = full_world(run_ahead)
    world.submit("c", [7] * 6 * BLOCK_SIZE, max_tokens=20, ignore_eos=True)
    while not world.outputs["c"]:
        world.step()
    assert {"a", "b"} <= {request.id for request in world.scheduler.running}
    world.run()


def test_when_its_prompt_is_done_it_waits_for_room_and_does_not_come_back_before(run_ahead):
    world = full_world(run_ahead)
    world.submit("c", [7] * 6 * BLOCK_SIZE, max_tokens=20, ignore_eos=True)
    world.run()
    # It gives way once. So does b, when a and b together have grown into what is left for them.
    assert preemptions(world) == 2


def test_its_prefill_goes_on_when_an_older_request_needs_a_page(run_ahead):
    world = full_world(run_ahead, max_num_batched_tokens=5)
    world.submit("c", [7] * 6 * BLOCK_SIZE, max_tokens=1, ignore_eos=True)
    while not world.outputs["c"]:
        world.step()
    # b has given way, since a took its page; c's pages would have been of no use to a.
    assert preemptions(world) == 1
    starts = [chunk.start for plan in world.plans for chunk in plan.chunks if 7 in chunk.token_ids]
    assert starts == sorted(set(starts)), "a part of the prompt was computed again"
    world.run()


def test_it_may_end_there_with_its_first_token(run_ahead):
    world = full_world(run_ahead)
    world.submit("c", [7] * 6 * BLOCK_SIZE, max_tokens=1, ignore_eos=True)
    while "c" not in world.ends:
        world.step()
    assert preemptions(world) == 0
    world.run()


def test_running_requests_leave_it_alone_and_have_all_other_pages(run_ahead):
    world = World(num_pages=16, prefill_reserve=8, run_ahead=run_ahead)
    world.submit("a", [5] * (8 * BLOCK_SIZE - 20), max_tokens=20, ignore_eos=True)
    world.run()
    assert preemptions(world) == 0
    assert len(world.outputs["a"]) == 20
