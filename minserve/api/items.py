"""POST /v1/responses, the part of it that needs no memory of earlier requests.

Owns: the handler. Does not know: what becomes of items (items_chat, items_answer); how chats are answered (chat).
"""

import uuid

from aiohttp import web

from minserve.api.auth import CALLER
from minserve.api.body import read_json
from minserve.api.chat import prepare_chat
from minserve.api.http import json_response
from minserve.api.items_answer import ItemsAnswer
from minserve.api.items_chat import chat_of
from minserve.api.items_request import ResponsesRequest
from minserve.api.schemas import parse
from minserve.api.service import SERVICE
from minserve.api.sse import stream_events


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer items with items, whole or streamed. Nothing is stored."""
    service = request.app[SERVICE]
    asked = parse(await read_json(request), ResponsesRequest)
    model = service.check_model(asked.model)
    chat = chat_of(asked)
    answer_id = f"resp_{uuid.uuid4().hex}"
    with chat.client_names():
        prepared = await prepare_chat(service, chat.request, answer_id, request[CALLER])
    answer = ItemsAnswer(service, asked, answer_id, model, prepared)
    if not asked.stream:
        return json_response(await answer.whole())
    return await stream_events(
        request, answer.events(), keep_alive_s=service.keep_alive_s, failure=answer.failure, named=True
    )
