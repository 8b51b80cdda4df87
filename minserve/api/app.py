"""The aiohttp application: the table of routes, and what surrounds every request.

Owns: request ids and the access log, which never holds what clients wrote.
Does not know: sockets, signals, how the engine is started.
"""

import logging
import re
import time
import uuid

from aiohttp import web

from minserve.api.auth import Authenticator
from minserve.api.chat import chat_completions
from minserve.api.completions import completions
from minserve.api.errors import error_middleware
from minserve.api.http import Handler, route_of
from minserve.api.models import list_models, show_model
from minserve.api.service import SERVICE, Service
from minserve.api.status import health, metrics, ready, version
from minserve.api.tokenization import detokenize, tokenize

logger = logging.getLogger("minserve.access")

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "X-Request-Id"

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def build_app(service: Service) -> web.Application:
    """The routes of one service."""
    app = web.Application(
        middlewares=[_access_middleware, error_middleware, Authenticator(service.config.api_keys).middleware],
        client_max_size=service.config.max_request_bytes,
    )
    app[SERVICE] = service
    app.on_response_prepare.append(_add_request_id)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{id:.+}", show_model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/ping", health),
            web.post("/ping", health),
            web.get("/version", version),
            web.get("/metrics", metrics),
        ]
    )
    return app


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
        route = route_of(request) or "(no route)"
        took_ms = (time.perf_counter() - begin) * 1000
        logger.info("%s %s %s %.0f ms id=%s", request.method, route, status, took_ms, request_id)


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID, "")
