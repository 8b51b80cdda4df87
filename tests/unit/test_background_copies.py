"""Copies on a stream of their own, by a stream that a test moves on by hand."""

import contextlib

import pytest

from minserve.memory.copies import Completion, Copy, StreamCopies
from minserve.memory.pinned import parse_cpus


class HandStream:
    """Events happen when the test says so."""

    def __init__(self):
        self.events = []
        self.is_entered = False

    @contextlib.contextmanager
    def entered(self):
        self.is_entered = True
        yield
        self.is_entered = False

    def record_event(self):
        assert self.is_entered
        self.events.append(HandEvent())
        return self.events[-1]


class HandEvent:
    has_happened = False

    def query(self):
        return self.has_happened


@pytest.fixture
def stream():
    return HandStream()


@pytest.fixture
def moved(stream):
    return []


@pytest.fixture
def copies(stream, moved):
    def move(some):
        assert stream.is_entered, "a copy is launched on another stream"
        moved.append([copy.id for copy in some])

    return StreamCopies(move, stream)


def test_a_poll_launches_what_waits_in_one_piece_of_each_kind_and_loads_first(copies, moved):
    copies.submit([Copy(1, "store", 0, 0)])
    copies.submit([Copy(2, "load", 1, 1)])
    copies.submit([Copy(3, "store", 2, 2)])
    assert moved == []
    assert copies.poll() == []
    assert moved == [[2], [1, 3]]
    assert copies.poll() == []
    assert moved == [[2], [1, 3]], "a copy is launched once"


def test_what_has_ended_is_told_once_and_not_before(copies, stream):
    copies.submit([Copy(1, "load", 0, 0), Copy(2, "load", 1, 1)])
    copies.poll()
    copies.submit([Copy(3, "store", 2, 2)])
    assert copies.poll() == []
    stream.events[1].has_happened = True
    assert copies.poll() == [], "a stream is in order"
    stream.events[0].has_happened = True
    assert copies.poll() == [Completion(1), Completion(2), Completion(3)]
    assert copies.poll() == []


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("0-1,16-17", {0, 1, 16, 17})]
)
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text, cpus):
    assert parse_cpus(text) == cpus
