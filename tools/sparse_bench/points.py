"""Which points are run, in which order, and about how long each takes.

Owns: that order: what matters most comes first, in case that time ends. Does not know: how a point is run.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .drive import MEASURED, NONE, WORST, Drafts, Lengths, Point
from .sizes import Sizes

FIT = 0
"""In place of a number of requests: as many as fit."""

FIRST = ((16384, 96), (32768, FIT), (32768, 48), (16384, FIT))
"""(context, requests) that come before all others."""

RIG_S, CAPTURE_S = 6.0, 4.0
"""Guesses: for memory and tables of another context; for the graphs of another number of requests."""


class Place(NamedTuple):
    """context, requests; FIT in the latter: as many as fit."""

    context: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Such as 96x16384, 48x32K or fitx128K."""
        requests, _, context = text.partition("x")
        return cls(tokens(context), number(requests))


def tokens(text: str) -> int:
    """Such as 16K, 16384."""
    return int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)


def number(text: str) -> int:
    """Of requests."""
    return FIT if text == "fit" else int(text)


def points(args: argparse.Namespace, num_fitting: Callable[[int], int]) -> Iterator[Point]:
    """All of them, the most important first, and of those of one place the one without fetches first: the others are
    compared with it. num_fitting: of a context."""
    places = args.only or [Place(context, requests) for context in args.context for requests in args.requests]
    first = [Place(*place) for place in FIRST if place in places]
    rest = [place for place in places if place not in first]
    drifts = [drift for drift in (NONE, WORST) if drift in args.drift]
    measured = [drift for drift in args.drift if drift == MEASURED]
    turns = [
        (first, args.drafts[:1], drifts),
        (first, args.drafts[1:], drifts),
        (first, args.drafts[:1], measured),
        (rest, args.drafts[:1], drifts),
        (rest, args.drafts[:1], measured),
        (rest, args.drafts[1:], drifts),
        (places, args.drafts[1:], measured),
    ]
    seen = set()
    for own, drafts, kinds in turns:
        for context, wanted in own:
            most = num_fitting(context)
            requests = min(wanted or most, most) if args.only else wanted or most
            for each in drafts:
                for drift in kinds:
                    point = Point(requests, context, drift, args.cap, each, fixed=args.fetch == "fixed")
                    if 0 < requests <= most and point not in seen:
                        seen.add(point)
                        yield point


def lengths_of(args: argparse.Namespace, point: Point) -> Lengths:
    """Working sets that begin anywhere take a while until they are what their queries want."""
    return Lengths(args.warm_up * (4 if point.drift == MEASURED else 1), args.windows, args.steps)


def expected_s(point: Point, sizes: Sizes, lengths: Lengths) -> float:
    """Seconds of a point, with its graphs."""
    cap = 0 if point.drift == NONE else point.cap
    return CAPTURE_S + lengths.all * sizes.expected_s(point.requests, cap)


def estimate_s(all_points: Sequence[Point], sizes_of: Callable[[int], Sizes], args: argparse.Namespace) -> float:
    """Seconds of all of them."""
    changes = sum(one.context != other.context for one, other in pairwise(all_points)) + 1
    own = (expected_s(point, sizes_of(point.context), lengths_of(args, point)) for point in all_points)
    return RIG_S * changes + sum(own)


def most_drafts(drafts: Sequence[Drafts]) -> int:
    return max(each.num for each in drafts)
