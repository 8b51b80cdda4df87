"""Who may call: bearer keys, denied by default.

Owns: the routes that need no key, and the comparison.
Does not know: what the routes do.
"""

import hashlib
import hmac

from aiohttp import web

from minserve.api.http import Handler, route_of
from minserve.errors import AuthenticationError

OPEN_ROUTES = frozenset({"/health", "/ready", "/ping", "/version"})
"""For load balancers. Everything else needs a key, paths that lead nowhere included."""


class Authenticator:
    """Checks `Authorization: Bearer KEY` against the server's keys. No keys: everybody may call."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        # Digests have one length, so that the comparison's time says nothing of the keys'.
        self._digests = [_digest(key) for key in keys]

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request pass, or raise AuthenticationError."""
        # By the route that will run, not by the path's spelling, which two parsers may read differently.
        if self._digests and route_of(request) not in OPEN_ROUTES and not self._has_key(request):
            raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        return await handler(request)

    def _has_key(self, request: web.Request) -> bool:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = _digest(key.strip())
        # All keys are compared, so that the time says nothing of which one was close.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
