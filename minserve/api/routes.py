"""The table of routes. Keys, the door and /openapi.json all go by it."""

from minserve.api.chat import chat_completions
from minserve.api.completions import completions
from minserve.api.http import Route
from minserve.api.items import responses
from minserve.api.items_request import ResponsesRequest
from minserve.api.items_shapes import EVENTS, Response
from minserve.api.models import list_models, show_model
from minserve.api.openapi import show_openapi
from minserve.api.page import show_page
from minserve.api.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    StatusResponse,
    TokenizeResponse,
    VersionResponse,
)
from minserve.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from minserve.api.stats import StatsEvent, StatsQuery, stream_stats
from minserve.api.status import health, metrics, ready, version
from minserve.api.tokenization import detokenize, tokenize

PAGE = Route("GET", "/", show_page, media="text/html", open=True)

ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, ChatRequest, ChatResponse, (ChatChunk,), needs_room=True),
    Route(
        "POST",
        "/v1/completions",
        completions,
        CompletionRequest,
        CompletionResponse,
        events=(CompletionResponse,),
        needs_room=True,
    ),
    Route("POST", "/v1/responses", responses, ResponsesRequest, Response, EVENTS, named=True, needs_room=True),
    Route("GET", "/v1/models", list_models, answer=ModelList),
    Route("GET", "/v1/models/{id}", show_model, answer=ModelCard),
    Route("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeResponse, needs_room=True),
    Route("POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse, needs_room=True),
    # For load balancers.
    Route("GET", "/health", health, answer=StatusResponse, open=True, may_be_down=True),
    Route("GET", "/ready", ready, answer=StatusResponse, open=True, may_be_down=True),
    Route("GET", "/ping", health, answer=StatusResponse, open=True, may_be_down=True),
    Route("POST", "/ping", health, answer=StatusResponse, open=True, may_be_down=True),
    Route("GET", "/version", version, answer=VersionResponse, open=True),
    Route("GET", "/metrics", metrics, media="text/plain"),
    Route("GET", "/stats/stream", stream_stats, events=(StatsEvent,), query=StatsQuery, may_be_full=True),
    Route("GET", "/openapi.json", show_openapi),
    PAGE,
)
