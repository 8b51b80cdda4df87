"""A pool of equal places for blocks: reference counts, prefix index, least-recently-used reuse, quarantine.

Owns: which places are free, cached, held or in quarantine, and which block key names which place.
Does not know: requests, tokens, tensors, or why a place is wanted.

A place is always in exactly one state:

    free         nothing of value in it
    cached       no holder, but it has a key: it can be found again until it is reused, oldest first
    held         at least one holder
    quarantined  its last holder has let go, but a launched step may still read or write it

    free --allocate--> held --release--> quarantined --end_step--> cached (with a key) or free
    (the quarantine is skipped when the step has ended already)
    cached --allocate--> held (the key is forgotten)        cached, quarantined --hold--> held (the key stays)

Steps are numbers that rise; whoever uses a pool chooses them. Where a step has a background pass, which ends later, the
two have numbers of their own (`foreground`, `background`).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


def foreground(step: int) -> int:
    """The number of what a step does before its result is there."""
    return 2 * step


def background(step: int) -> int:
    """The number of what a step does for the working sets of sparse requests, beside the step after it."""
    return 2 * step + 1


class PlacePool:
    """`num_places` places, numbered from 0."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: dict[int, int] = {}
        self._holders = [0] * num_places
        self._key_of: dict[int, bytes] = {}
        self._place_of: dict[bytes, int] = {}
        self._last_step = [0] * num_places
        self._ended_step = 0

    @property
    def num_available(self) -> int:
        """Places that `allocate` could give now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Places with nothing of value in them."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Places that become available when the launched steps have ended."""
        return len(self._quarantined)

    @property
    def num_held(self) -> int:
        return self.num_places - self.num_available - self.num_quarantined

    def find(self, key: bytes) -> int | None:
        """The place that holds the block of this key, if one does. It stays only while held."""
        return self._place_of.get(key)

    def is_available(self, place: int) -> bool:
        """Whether `allocate` could give this place: holding it takes one from `num_available`."""
        return self._holders[place] == 0 and place not in self._quarantined

    def allocate(self, count: int) -> list[int] | None:
        """`count` places with one holder each, or None and no change. Cached blocks are given up oldest first."""
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def hold(self, place: int) -> None:
        """One more holder of a place that was found or is held already."""
        if self._holders[place] == 0:
            self._cached.pop(place, None)
            self._quarantined.pop(place, None)
            assert place in self._key_of, f"place {place} was held again without a key"
        self._holders[place] += 1

    def release(self, places: Sequence[int], last_step: int) -> None:
        """One holder fewer of each. The holder's steps up to `last_step` may touch the place: it is reused when the
        steps of all its holders have ended.

        Places are given up from the last to the first, so that the end of a sequence is forgotten before its beginning.
        """
        for place in reversed(places):
            assert self._holders[place] > 0, f"place {place} released without a holder"
            self._holders[place] -= 1
            self._last_step[place] = max(self._last_step[place], last_step)
            if self._holders[place] == 0:
                if self._last_step[place] > self._ended_step:
                    self._quarantined[place] = self._last_step[place]
                else:
                    self._settle(place)

    def end_step(self, step: int) -> None:
        """Step `step` and all before it read and write nothing any more."""
        self._ended_step = step
        for place in [place for place, last in self._quarantined.items() if last <= step]:
            del self._quarantined[place]
            self._settle(place)

    def publish(self, place: int, key: bytes) -> bool:
        """Let a held place be found by `key`. False if another place has that key: then nothing changes."""
        assert self._holders[place] > 0, f"place {place} published without a holder"
        if self._place_of.setdefault(key, place) != place:
            return False
        assert self._key_of.setdefault(place, key) == key, f"place {place} published under a second key"
        return True

    def unpublish(self, place: int) -> None:
        """A held place turns out not to hold the block of its key."""
        assert self._holders[place] > 0, f"place {place} unpublished without a holder"
        key = self._key_of.pop(place, None)
        if key is not None:
            del self._place_of[key]

    def is_published(self, place: int) -> bool:
        """Whether a place can be found by a key."""
        return place in self._key_of

    def num_holders(self, place: int) -> int:
        """How many references a place has."""
        return self._holders[place]

    def forget_all(self) -> None:
        """Drop every key; blocks in use stay in use."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._place_of.clear()

    def _settle(self, place: int) -> None:
        if place in self._key_of:
            self._cached[place] = None
        else:
            self._free.append(place)

    def _take(self) -> int:
        if self._free:
            place = self._free.pop()
        else:
            place, _ = self._cached.popitem(last=False)
            del self._place_of[self._key_of.pop(place)]
        self._holders[place] = 1
        return place

    def check(self, holders: Iterable[int]) -> None:
        """Assert every invariant. holders: each held place once for each of its holders."""
        expected = Counter(holders)
        held = {place for place in range(self.num_places) if self._holders[place] > 0}
        assert {place: self._holders[place] for place in held} == dict(expected), "references differ from holders"
        states = [set(self._free), set(self._cached), set(self._quarantined), held]
        assert len(self._free) == len(states[0]), "a place is free twice"
        assert sum(map(len, states)) == self.num_places == len(set().union(*states)), "states overlap or lose a place"
        assert {key: place for place, key in self._key_of.items()} == self._place_of, "keys and places are not inverse"
        assert not states[0] & self._key_of.keys(), "a free place has a key"
        assert states[1] <= self._key_of.keys(), "a cached place has no key"
