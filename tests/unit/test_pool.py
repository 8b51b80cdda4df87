"""PlacePool: every place is in one state, and references equal holders, whatever happens in whatever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from minserve.memory.pool import PlacePool

NUM_PLACES = 6


class PoolMachine(RuleBasedStateMachine):
    """A model of the pool: who holds what, which key names which content."""

    def __init__(self):
        super().__init__()
        self.pool = PlacePool(NUM_PLACES)
        self.holders = []
        self.keys = {}
        self.launched = 0
        self.ended = 0
        self.last_use = dict.fromkeys(range(NUM_PLACES), 0)

    @rule(count=st.integers(0, NUM_PLACES + 1))
    def allocate(self, count):
        available = self.pool.num_available
        places = self.pool.allocate(count)
        assert (places is None) == (count > available)
        for place in places or []:
            assert place not in self.holders, "a held place was given away"
            assert self.last_use[place] <= self.ended, "a place was given away under a launched step"
            self.holders.append(place)
            self.keys = {key: other for key, other in self.keys.items() if other != place}

    @rule(data=st.data(), steps_ago=st.integers(0, 2))
    def release(self, data, steps_ago):
        if self.holders:
            place = data.draw(st.sampled_from(self.holders))
            self.holders.remove(place)
            last_step = max(0, self.launched - steps_ago)
            self.last_use[place] = max(self.last_use[place], last_step)
            self.pool.release([place], last_step)

    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, data, key):
        unnamed = [place for place in self.holders if place not in self.keys.values()]
        if unnamed:
            place = data.draw(st.sampled_from(unnamed))
            assert self.pool.publish(place, key) == (key not in self.keys)
            self.keys.setdefault(key, place)

    @rule(key=st.sampled_from([b"a", b"b", b"c"]))
    def find_and_hold(self, key):
        place = self.pool.find(key)
        assert place == self.keys.get(key)
        if place is not None:
            self.pool.hold(place)
            self.holders.append(place)

    @rule(data=st.data())
    def unpublish(self, data):
        if self.holders:
            place = data.draw(st.sampled_from(self.holders))
            self.pool.unpublish(place)
            self.keys = {key: other for key, other in self.keys.items() if other != place}

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.keys.clear()

    @rule()
    def launch(self):
        self.launched += 1

    @rule()
    def end_step(self):
        if self.ended < self.launched:
            self.ended += 1
            self.pool.end_step(self.ended)

    @invariant()
    def holds(self):
        self.pool.check(self.holders)
        waiting = {place for place, step in self.last_use.items() if step > self.ended} - set(self.holders)
        assert self.pool.num_quarantined == len(waiting)
        assert self.pool.num_available == NUM_PLACES - len(waiting | set(self.holders))


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def released(pool, places, step=0):
    pool.release(places, step)
    return places


def test_cached_places_are_reused_oldest_first_and_free_ones_before_them():
    pool = PlacePool(3)
    first, second = pool.allocate(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    released(pool, [first])
    released(pool, [second])
    pool.allocate(1)
    assert pool.find(b"first") == first
    assert pool.allocate(1) == [first]
    assert pool.find(b"first") is None
    assert pool.find(b"second") == second


def test_the_end_of_a_sequence_is_forgotten_before_its_beginning():
    pool = PlacePool(2)
    head, tail = pool.allocate(2)
    pool.publish(head, b"head")
    pool.publish(tail, b"tail")
    pool.release([head, tail], 0)
    assert pool.allocate(1) == [tail]


def test_a_released_place_waits_for_the_last_step_that_may_touch_it():
    pool = PlacePool(1)
    places = pool.allocate(1)
    pool.release(places, 2)
    pool.end_step(1)
    assert pool.allocate(1) is None
    pool.end_step(2)
    assert pool.allocate(1) == places


def test_a_place_is_free_at_once_if_its_step_has_ended():
    pool = PlacePool(1)
    pool.end_step(3)
    places = pool.allocate(1)
    pool.release(places, 3)
    assert pool.num_available == 1


def test_a_quarantined_place_with_a_key_can_be_held_again():
    pool = PlacePool(1)
    (place,) = pool.allocate(1)
    pool.publish(place, b"key")
    pool.release([place], 1)
    pool.hold(place)
    pool.end_step(1)
    pool.check([place])


def test_a_second_place_with_a_known_key_stays_nameless():
    pool = PlacePool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"key")
    assert not pool.publish(second, b"key")
    pool.release([second], 0)
    assert pool.find(b"key") == first


@pytest.mark.parametrize("places", [[0], [0, 0]])
def test_releasing_more_often_than_holding_is_a_bug(places):
    pool = PlacePool(1)
    pool.allocate(1)
    pool.release([0], 0)
    with pytest.raises(AssertionError):
        pool.release(places, 0)
