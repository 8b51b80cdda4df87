"""The answer of /v1/responses, whole or as the events of a stream.

Owns: how a response begins and ends, and what it says of its request.
Does not know: which items a text becomes (items_writer), what is asked of the engine (chat), how events are framed.

The whole answer is the response in the last event of the stream, so the two cannot differ.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from minserve.api.chat_answer import Chat
from minserve.api.errors import error_response
from minserve.api.generation import run
from minserve.api.items_request import ResponsesRequest
from minserve.api.items_shapes import (
    ErrorEvent,
    Event,
    IncompleteDetails,
    ItemsError,
    ItemsUsage,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseStatus,
)
from minserve.api.items_writer import ItemWriter
from minserve.api.service import Service
from minserve.text.output import Piece


class ItemsAnswer:
    """The answer to one request."""

    def __init__(self, service: Service, request: ResponsesRequest, answer_id: str, model: str, chat: Chat) -> None:
        self._service = service
        self._request = request
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._chat = chat
        self._items = ItemWriter()
        self._num_events = 0

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer. The last one has the whole of it."""
        [parser] = self._chat.parsers
        async with aclosing(run(self._service.engine, self._chat.choices)) as pieces:
            async for piece in pieces:
                if not self._num_events:
                    for begun in (ResponseCreated, ResponseInProgress):
                        yield self._numbered(begun(self._response("in_progress")))
                for said in parser.push(piece):
                    for event in self._items.write(said):
                        yield self._numbered(event)
                if piece.finish_reason is not None:
                    cut = parser.call_is_cut if self._items.in_call else piece.finish_reason == "length"
                    for event in self._items.finish("incomplete" if cut else "completed"):
                        yield self._numbered(event)
                    yield self._numbered(self._end(piece))

    async def whole(self) -> Response:
        """The whole answer."""
        response: Response | None = None
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, ResponseCompleted | ResponseIncomplete):
                    response = event.response
        assert response is not None, "run() yields the last piece of every choice"
        return response

    def failure(self, error: Exception) -> Event:
        """The last event of a stream in which something has failed."""
        told = error_response(error).error
        if not self._num_events:
            return self._numbered(ErrorEvent(told.code, told.message, told.param))
        response = self._response("failed")
        response.output = [*self._items.done, *self._items.unfinished()]
        response.error = ItemsError("server_error", told.message)
        return self._numbered(ResponseFailed(response))

    def _numbered(self, event: Event) -> Event:
        event.sequence_number = self._num_events
        self._num_events += 1
        return event

    def _end(self, piece: Piece) -> Event:
        response = self._response("completed" if piece.finish_reason == "stop" else "incomplete")
        response.output = self._items.done
        [parser] = self._chat.parsers
        response.usage = ItemsUsage.of(self._chat.usage(counts_reasoning=False), parser.num_reasoning_tokens)
        if response.status == "completed":
            return ResponseCompleted(response)
        response.incomplete_details = IncompleteDetails("max_output_tokens")
        return ResponseIncomplete(response)

    def _response(self, status: ResponseStatus) -> Response:
        request, params = self._request, self._chat.choices[0].submit.params
        return Response(
            id=self._id,
            created_at=self._created,
            status=status,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata,
            model=self._model,
            output=[],
            parallel_tool_calls=request.parallel_tool_calls,
            temperature=params.temperature,
            reasoning=request.reasoning,
            text=request.text,
            tool_choice=request.tool_choice or "auto",
            tools=request.tools,
            top_p=params.top_p,
            user=request.user,
        )
