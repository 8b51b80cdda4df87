"""GET /health, /ready, /ping, /version, /metrics: how the server is.

/health: the engine lives; while draining it still does. /ready: new work is taken; send none on 503.
"""

from aiohttp import web

from minserve import __version__
from minserve.api.http import json_response
from minserve.api.responses import StatusResponse, VersionResponse
from minserve.api.service import SERVICE


async def health(request: web.Request) -> web.Response:
    """200 while the engine lives, else 503. /ping is the same under SageMaker's name."""
    alive = request.app[SERVICE].engine.alive
    return json_response(StatusResponse("ok" if alive else "dead"), status=200 if alive else 503)


async def ready(request: web.Request) -> web.Response:
    """200 while new work is taken, else 503."""
    service = request.app[SERVICE]
    if service.admission.open:
        return json_response(StatusResponse("ready"))
    return json_response(StatusResponse("draining" if service.engine.alive else "dead"), status=503)


async def version(_request: web.Request) -> web.Response:
    """The version of minserve."""
    return json_response(VersionResponse(__version__))


async def metrics(request: web.Request) -> web.Response:
    """What Prometheus scrapes."""
    body = request.app[SERVICE].metrics.render()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
