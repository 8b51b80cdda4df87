"""GET /v1/models and /v1/models/{id}: which names are served."""

from aiohttp import web

from minserve.api.http import json_response
from minserve.api.responses import ModelCard, ModelList
from minserve.api.service import SERVICE, Service


async def list_models(request: web.Request) -> web.Response:
    """Every name the server answers to."""
    service = request.app[SERVICE]
    return json_response(ModelList([_card(service, name) for name in service.config.served_model_names]))


async def show_model(request: web.Request) -> web.Response:
    """One of them; names may hold slashes."""
    service = request.app[SERVICE]
    return json_response(_card(service, service.check_model(request.match_info["id"])))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(name, service.created, service.config.served_model_names[0], service.engine.info.max_model_len)
