"""Pages of other origins: browsers may show them our answers if the server was told so.

Owns: the headers of CORS and the answer to a preflight. Does not know: routes, keys.
Nothing is allowed by default: a browser then sends no JSON here from a foreign page, and shows it no answer.
"""

import re

from aiohttp import web

from minserve.api.http import Handler

ANY = "*"
EXPOSED = "X-Request-Id, Retry-After"
PREFLIGHT_S = 600
"""For how long a browser may remember the answer."""

_HEADER_NAMES = re.compile(r"[A-Za-z0-9, -]{1,1000}")


class Cors:
    """Lets the pages of some origins in; "*": of all."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a preflight, which carries no key."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return await handler(request)
        if not self._allows(request):
            return await handler(request)
        headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(PREFLIGHT_S)}
        # Clients in browsers send headers of their own making; which, is no matter of safety.
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page read the answer; a signal, so that it also comes before a stream's first byte."""
        if self._origins:
            response.headers.add("Vary", "Origin")
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and (ANY in self._origins or origin in self._origins)
