"""GET /stats/stream: the server's figures, once a second, for people who look.

Owns: what an event holds, how many may look, and which requests each is shown: those of their own key.
Does not know: how figures are worked out (figures), how a working set is kept (the engine tells it when it is asked).
While nobody looks, nothing here runs.
"""

import copy
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from minserve.api.auth import CALLER, Caller
from minserve.api.figures import Figures, figures_between, gauges
from minserve.api.service import SERVICE, Service
from minserve.api.sse import stream_events
from minserve.errors import NotFoundError, OverloadedError, RequestError
from minserve.protocol import Stats, WorkingSet

MAX_VIEWERS = 16
FULL_RETRY_AFTER_S = 10

MAX_REQUESTS_SHOWN = 64


class RequestFigures(msgspec.Struct):
    """One text in the making. num_tokens: generated so far."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int


class StatsEvent(msgspec.Struct):
    """time: in seconds since 1970. requests: the viewer's own that run or wait, oldest first, and not more than 64.
    working_set: of the request that was asked for, while it is sparse; the KV of all others is in pages."""

    time: float
    figures: Figures
    requests: list[RequestFigures]
    working_set: WorkingSet | UnsetType = UNSET


class StatsQuery(msgspec.Struct, frozen=True):
    """request: whose working set the events are to hold, by its id in `requests`."""

    request: str | None = None


class Viewers:
    """Those who look. Each costs some work a second, so there may only be so many."""

    def __init__(self) -> None:
        self.num = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place. Raises OverloadedError if there is none."""
        if self.num >= MAX_VIEWERS:
            raise OverloadedError(
                f"{MAX_VIEWERS} clients read the statistics already",
                retry_after_s=FULL_RETRY_AFTER_S,
                code="too_many_viewers",
            )
        self.num += 1
        try:
            yield
        finally:
            self.num -= 1


VIEWERS = web.AppKey("viewers", Viewers)


async def stream_stats(request: web.Request) -> web.StreamResponse:
    """The server's figures once a second, until the client leaves or the server stops."""
    service = request.app[SERVICE]
    query = read_query(request)
    caller = request[CALLER]
    if query.request is not None and not service.in_flight.has(caller, query.request):
        raise NotFoundError(
            f"request: no request of yours that runs or waits is called {query.request[:200]!r}", param="request"
        )
    with request.app[VIEWERS].admit():
        return await stream_events(
            request, stats_events(service, caller, query.request), keep_alive_s=service.keep_alive_s
        )


def read_query(request: web.Request) -> StatsQuery:
    """The parameters of the address. Raises RequestError for one that is unknown or given twice."""
    for name in request.query:
        if name not in StatsQuery.__struct_fields__:
            raise RequestError(f"unknown parameter {name[:100]!r}; allowed: request", param=name[:100])
        if len(request.query.getall(name)) > 1:
            raise RequestError(f"{name} is given twice", param=name)
    return StatsQuery(**request.query)


async def stats_events(service: Service, caller: Caller, request_id: str | None) -> AsyncGenerator[StatsEvent, None]:
    """One event at once, without rates, and then one each interval."""
    before: _Reading | None = None
    while service.admission.open:
        now = _Reading(service)
        event = StatsEvent(time.time(), now.since(before), _requests_of(service, caller))
        if request_id is not None and service.in_flight.has(caller, request_id):
            event.working_set = await service.engine.working_set(request_id) or UNSET
        yield event
        before = now
        await service.admission.wait_draining(service.stats_interval_s)


class _Reading:
    """All counters at one moment: copies, since an engine may count on in the same object."""

    def __init__(self, service: Service) -> None:
        metrics = service.metrics
        self.at = metrics.clock()
        self.stats: Stats = copy.deepcopy(service.engine.stats)
        self.first_tokens = metrics.num_first_tokens, metrics.first_tokens_s

    def since(self, before: "_Reading | None") -> Figures:
        """The figures of the time since another reading."""
        if before is None or self.at <= before.at:
            return gauges(self.stats)
        figures = figures_between(before.stats, self.stats, self.at - before.at)
        num, seconds = (now - then for now, then in zip(self.first_tokens, before.first_tokens, strict=True))
        if num:
            figures.time_to_first_token_s = seconds / num
        return figures


def _requests_of(service: Service, caller: Caller) -> list[RequestFigures]:
    return [
        RequestFigures(
            text.submit.request_id,
            len(text.submit.prompt_token_ids),
            text.output.cached_tokens,
            text.output.num_tokens,
        )
        for text in service.in_flight.of(caller, MAX_REQUESTS_SHOWN)
    ]
