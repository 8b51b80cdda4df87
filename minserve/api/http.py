"""What every route needs of HTTP: the handler's type, JSON answers, the name of a route.

Does not know: what the routes answer.
"""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(body: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """body as a JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def route_of(request: web.Request) -> str | None:
    """The route that runs, as `build_app` spells it, if one does. (A path may hold anything, even line breaks.)"""
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical
