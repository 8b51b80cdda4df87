"""What was let in is prepared a piece in each turn of the loop, and everything else goes on between two pieces."""

import asyncio
from itertools import pairwise

import pytest

from minserve.api import turns as turns_module
from minserve.api.turns import Turns


@pytest.fixture
def work():
    """work(name) -> a task that waits for its turn; and who had theirs, in this order."""
    turns, done = Turns(), []

    async def piece(name):
        await turns.next()
        done.append(name)

    def begin(name):
        return asyncio.create_task(piece(name))

    return begin, done


async def test_in_each_turn_of_the_loop_one_goes_on_in_the_order_in_which_they_came(work):
    begin, done = work
    tasks = [begin(name) for name in "abcd"]
    num_done = [0]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        num_done.append(len(done))
    assert done == ["a", "b", "c", "d"]
    assert max(now - before for before, now in pairwise(num_done)) == 1


async def test_who_has_left_costs_no_turn(work):
    begin, done = work
    first, second, third = (begin(name) for name in "abc")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    assert done == ["a", "c"]


async def test_while_others_are_refused_there_is_a_pause_after_each_piece(monkeypatch):
    monkeypatch.setattr(turns_module, "PAUSE_S", 3600.0)
    refusing = [True]
    turns = Turns(lambda: refusing[0])
    await turns.next()
    waiting = asyncio.create_task(turns.next())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    refusing[0] = False
    others = Turns(lambda: refusing[0])
    await others.next()
    await others.next()


async def test_who_is_alone_does_not_wait():
    with pytest.raises(StopIteration):
        Turns().next().send(None)
