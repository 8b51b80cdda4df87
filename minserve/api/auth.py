"""Who calls: bearer keys, denied by default.

Owns: the comparison, and what tells the holders of different keys apart.
Does not know: what the routes do, nor how much each caller may ask for (admission).
"""

import hashlib
import hmac
from typing import NamedTuple

from aiohttp import web

from minserve.api.http import Handler, route_of
from minserve.errors import AuthenticationError


class Caller(NamedTuple):
    """Whoever holds one of the keys.

    number: of the key, from 1, in the order of the command line; 0: none was asked for.
    tenant: a digest of the key, "" without one. It goes into every prefix hash, so that no client can tell by the time
    of an answer what another has sent.
    """

    number: int
    tenant: str

    def salt(self, cache_salt: str | None) -> str:
        """What this caller's prefixes are hashed with. Their own salt parts their cache; it never joins another's."""
        return f"{self.tenant}/{cache_salt or ''}" if self.tenant else cache_salt or ""


ANYBODY = Caller(0, "")
CALLER = web.RequestKey("caller", Caller)


class Authenticator:
    """Checks `Authorization: Bearer KEY` against the server's keys. No keys: everybody may call.

    open_routes need no key. Everything else does, paths that lead nowhere included.
    """

    def __init__(self, keys: tuple[str, ...], open_routes: frozenset[str]) -> None:
        # Digests have one length, so that the comparison's time says nothing of the keys'.
        self._digests = [_digest(key) for key in keys]
        self._callers = [Caller(number, _digest(f"tenant {key}").hex()[:32]) for number, key in enumerate(keys, 1)]
        self._open_routes = open_routes

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request pass and say whose it is, or raise AuthenticationError."""
        request[CALLER] = ANYBODY
        # By the route that will run, not by the path's spelling, which two parsers may read differently.
        if self._digests and route_of(request) not in self._open_routes:
            request[CALLER] = self._caller(request)
        return await handler(request)

    def _caller(self, request: web.Request) -> Caller:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = _digest(key.strip())
        # All keys are compared, so that the time says nothing of which one was close.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        return self._callers[matches.index(True)]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
