"""GET /openapi.json: what the API takes and answers, made from the structs that check it and the table of routes.

Owns: how a struct is shown where JSON says less or more than its type. Does not know: the routes' handlers.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from minserve import __version__
from minserve.api.http import Route
from minserve.api.responses import ErrorResponse
from minserve.api.schemas import INERT, Body

OPENAPI = web.AppKey("openapi", bytes)

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"

REFUSALS = {
    400: "The request is malformed; `param` names the field",
    401: "No API key, or a wrong one",
    404: "The model is not served here",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The body is not plain JSON",
    429: "This API key has as many requests as it may",
    500: "The engine failed",
    503: "The server is full, stopping or dead; see Retry-After",
}


async def show_openapi(request: web.Request) -> web.Response:
    """This description."""
    return web.Response(body=request.app[OPENAPI], content_type="application/json", charset="utf-8")


def openapi(routes: Sequence[Route], *, with_keys: bool) -> bytes:
    """The document, of OpenAPI 3.1."""
    bodies = {route.body for route in routes if route.body}
    answers = {kind for route in routes for kind in (route.answer, *route.events) if kind}
    kinds = sorted(bodies | answers | {ErrorResponse}, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for body in bodies:
        schemas[body.__name__] = _as_checked(schemas[body.__name__], body)
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, with_keys)
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "minserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(document)


def _as_checked(schema: Json, body: type[Body]) -> Json:
    """The schema of a body: null means "not given", and nothing else is taken but what asks for nothing."""
    required = schema.get("required", [])
    taken: Json = {name: {} for name in sorted(INERT)}
    taken |= {name: {"enum": [*values, None]} for name, values in body.not_supported.items()}
    for name, field in schema["properties"].items():
        taken[name] = field if name in required else _or_null(field)
    return schema | {"properties": taken, "additionalProperties": False}


def _or_null(field: Json) -> Json:
    null = {"type": "null"}
    kinds = field.get("anyOf") or [{key: value for key, value in field.items() if key != "default"}]
    kept = {"default": field["default"]} if "default" in field else {}
    return kept | {"anyOf": kinds if null in kinds else [*kinds, null]}


def _operation(route: Route, with_keys: bool) -> Json:
    doc = inspect.getdoc(route.handler) or ""
    name = "".join(part.strip("{}").capitalize() for part in route.path.split("/"))
    operation: Json = {
        "operationId": f"{route.method.lower()}{name}",
        "summary": doc.partition("\n")[0],
        "responses": {"200": {"description": "The answer", "content": _content(route)}},
    }
    if "{" in route.path:
        parameter = route.path[route.path.index("{") + 1 : -1]
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": schema}]
    if route.query:
        operation["parameters"] = _parameters(route.query)
    if route.body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(route.body)}}}
    if with_keys:
        operation["security"] = [] if route.open else [{"key": []}]
    for status in _refusals(route, with_keys):
        operation["responses"][str(status)] = {
            "description": REFUSALS[status],
            "content": {"application/json": {"schema": _ref(ErrorResponse)}},
        }
    if route.may_be_down:
        operation["responses"]["503"] = {"description": "It is down", "content": _content(route)}
    return operation


def _parameters(query: type[msgspec.Struct]) -> list[Json]:
    """The parameters of an address: all may be left out."""
    _, schemas = msgspec.json.schema_components([query])
    fields: Json = schemas[query.__name__]["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": _without_null(field)}
        for name, field in fields.items()
    ]


def _without_null(field: Json) -> Json:
    [kind] = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
    return dict(kind)


def _refusals(route: Route, with_keys: bool) -> list[int]:
    statuses = [400]
    if with_keys and not route.open:
        statuses.append(401)
    if "{" in route.path or route.body or route.query:
        statuses.append(404)
    if route.body:
        statuses += [408, 413, 415, 500]
    if route.needs_room:
        statuses += [429, 503]
    if route.may_be_full:
        statuses.append(503)
    return statuses


def _content(route: Route) -> Json:
    if route.answer is None and not route.events:
        return {route.media: {}}
    content: Json = {}
    if route.answer is not None:
        content[route.media] = {"schema": _ref(route.answer)}
    if route.events:
        kinds: list[type[msgspec.Struct]] = [*route.events, *([] if route.named else [ErrorResponse])]
        told: Json = {
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": [_ref(kind) for kind in kinds]},
        }
        data = {"type": "string"} | (told if route.named else {"anyOf": [{"const": "[DONE]"}, told]})
        event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return content


def _ref(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}
