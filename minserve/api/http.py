"""What every route needs of HTTP: the handler's type, JSON answers, what a route is.

Does not know: what the routes answer.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
from aiohttp import web

from minserve.api.schemas import Body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """One row of the table of routes: what runs, and all that is said of it elsewhere.

    body: what the request's JSON must be. answer: the JSON of the answer; None: whatever is of the type `media`.
    events: the JSON of the events, if the answer can be a stream; without an answer, if it is always one. named: each
    has its type for a name, and failures are among them; else failures are told as everywhere, and [DONE] is the last
    event. query: the parameters of the address.
    needs_room: refused at the door while the server is full, before its body is read.
    may_be_full: has a limit of its own, and refuses with 503.
    open: needs no key. may_be_down: 503 is one of its answers, not a failure.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    answer: type[msgspec.Struct] | None = None
    events: tuple[type[msgspec.Struct], ...] = ()
    named: bool = False
    query: type[msgspec.Struct] | None = None
    media: str = "application/json"
    needs_room: bool = False
    may_be_full: bool = False
    open: bool = False
    may_be_down: bool = False


def json_response(body: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """body as a JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def route_of(request: web.Request) -> str | None:
    """The route that runs, as the table spells it, if one does. (A path may hold anything, even line breaks.)"""
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical
