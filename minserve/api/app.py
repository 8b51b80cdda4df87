"""The aiohttp application: the table of routes, and what surrounds every request.

Owns: request ids and the access log, which never holds what clients wrote.
Does not know: sockets, signals, how the engine is started.
"""

import logging
import re
import time
import uuid

from aiohttp import web

from minserve.api.admission import PLACE
from minserve.api.auth import ANYBODY, CALLER, Authenticator
from minserve.api.body import BODIES
from minserve.api.cors import Cors
from minserve.api.errors import error_middleware
from minserve.api.http import Handler, Route, route_of
from minserve.api.openapi import OPENAPI, openapi
from minserve.api.routes import PAGE, ROUTES
from minserve.api.service import SERVICE, Service
from minserve.api.stats import VIEWERS, Viewers

logger = logging.getLogger("minserve.access")

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "X-Request-Id"

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def build_app(service: Service) -> web.Application:
    """The routes of one service and, around them, from the outside in: log, other origins, errors, keys, door."""
    config = service.config
    cors = Cors(config.allowed_origins)
    routes = [route for route in ROUTES if config.page or route is not PAGE]
    authenticator = Authenticator(config.api_keys, frozenset(route.path for route in routes if route.open))
    app = web.Application(
        middlewares=[
            _access_middleware,
            cors.middleware,
            error_middleware,
            authenticator.middleware,
            _door_middleware,
        ]
    )
    app[SERVICE] = service
    app[BODIES] = service.bodies
    app[VIEWERS] = Viewers()
    app[OPENAPI] = openapi(routes, with_keys=bool(config.api_keys))
    app.on_response_prepare.append(_add_request_id)
    app.on_response_prepare.append(cors.add_headers)
    app.add_routes([_route_def(route) for route in routes])
    return app


def _route_def(route: Route) -> web.RouteDef:
    # A model's name may hold slashes.
    path = route.path.replace("}", ":.+}")
    if route.method == "POST":
        return web.post(path, route.handler)
    # GET brings HEAD with it, but of what never ends.
    return web.get(path, route.handler, allow_head=not route.events)


_NEEDS_ROOM = frozenset(route.path for route in ROUTES if route.needs_room)


@web.middleware
async def _door_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """While the server is full, refuse before a body is read. What is let in has its place until it is answered."""
    if route_of(request) not in _NEEDS_ROOM:
        return await handler(request)
    with request.app[SERVICE].admission.enter(request[CALLER]) as request[PLACE]:
        return await handler(request)


@web.middleware
async def _access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
    request[REQUEST_ID] = request_id
    begin = time.perf_counter()
    status = "gone"
    try:
        response = await handler(request)
        status = str(response.status)
        return response
    finally:
        line = {
            "method": request.method,
            "route": route_of(request) or "(no route)",
            "status": status,
            "ms": round((time.perf_counter() - begin) * 1000),
            "request_id": request_id,
            "key": request.get(CALLER, ANYBODY).number,
        }
        logger.info("%(method)s %(route)s %(status)s %(ms)d ms id=%(request_id)s key=%(key)d", line, extra=line)


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID, "")
