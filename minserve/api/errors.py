"""Every failure as a JSON answer in OpenAI's shape.

Owns: which exception becomes which status and body.
Does not know: the routes; what happens once a stream has begun (sse).
"""

import logging

from aiohttp import web

from minserve.api.http import Handler, json_response, route_of
from minserve.api.responses import ErrorBody, ErrorResponse
from minserve.api.service import SERVICE
from minserve.errors import EngineError, NotFoundError, OverloadedError, RequestError

logger = logging.getLogger("minserve.api")

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200


def error_response(error: Exception) -> ErrorResponse:
    """What a client is told of an error: only what was meant for it."""
    if isinstance(error, RequestError):
        # Messages quote what clients wrote, at any length; and a path may hold bytes that are no UTF-8.
        message, param = _sendable(error.message, MAX_MESSAGE_CHARS), error.param
        param = None if param is None else _sendable(param, MAX_PARAM_CHARS)
        return ErrorResponse(ErrorBody(message, error.error_type, param, error.code))
    if isinstance(error, EngineError):
        return ErrorResponse(ErrorBody(str(error), "internal_server_error", None, "engine_error"))
    return ErrorResponse(ErrorBody("internal server error", "internal_server_error", None, None))


def _sendable(text: str, max_chars: int) -> str:
    text = text if len(text) <= max_chars else text[:max_chars] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises into an answer. A client that has gone is no error."""
    try:
        return await handler(request)
    except OverloadedError as error:
        request.app[SERVICE].metrics.refused(error.code or "overloaded")
        headers = {"Retry-After": str(error.retry_after_s)}
        return json_response(error_response(error), status=error.status, headers=headers)
    except RequestError as error:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        return json_response(error_response(error), status=error.status, headers=headers)
    except web.HTTPException as error:
        return _http_error(request, error)
    except web.RequestPayloadError:
        return json_response(error_response(RequestError("the body could not be read")), status=400)
    except EngineError as error:
        logger.error("%s %s: %s", request.method, route_of(request), error)
        return json_response(error_response(error), status=500)
    except ConnectionError:
        raise
    except Exception as error:
        logger.exception("%s %s failed", request.method, route_of(request))
        return json_response(error_response(error), status=500)


def _http_error(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        return error
    headers: dict[str, str] = {}
    told: RequestError
    if isinstance(error, web.HTTPNotFound):
        told = NotFoundError(f"there is no {request.method} {request.path[:200]} here")
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        headers["Allow"] = allowed
        told = RequestError(f"{request.method} is not allowed here; allowed: {allowed}")
    else:
        told = RequestError(error.reason)
    return json_response(error_response(told), status=error.status, headers=headers)
