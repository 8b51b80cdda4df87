"""POST /v1/chat/completions.

Owns: the chat shapes of whole and streamed answers, and what tools do to them.
Does not know: how text is made (generation) or framed (sse).
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from aiohttp import web

from minserve.api.auth import CALLER
from minserve.api.body import read_json
from minserve.api.generation import Choice, run
from minserve.api.http import json_response
from minserve.api.logprobs import chat_logprobs, prompt_logprobs
from minserve.api.prepare import encode_chat, make_choices
from minserve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    FinishReason,
    FunctionCall,
    PromptLogprobs,
    TokenLogprob,
    ToolCall,
    Usage,
    usage,
)
from minserve.api.sampling import check_prompt_logprobs, fit_context, sampling_params
from minserve.api.schemas import ChatRequest, parse
from minserve.api.service import SERVICE, Service
from minserve.api.sse import stream_events
from minserve.config import ServerConfig
from minserve.errors import RequestError
from minserve.text.output import Piece
from minserve.text.toolcalls import HermesParser, ToolEvent, tool_parser_class


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, whole or streamed."""
    service = request.app[SERVICE]
    asked = parse(await read_json(request), ChatRequest)
    model = service.check_model(asked.model)
    parser_class = _tool_parser(asked, service.config)
    caller = request[CALLER]
    with service.admission.admit(caller, asked.n):
        prompt = await encode_chat(service, asked, asked.messages, add_special_tokens=asked.add_special_tokens)
        check_prompt_logprobs(len(prompt) * asked.n, asked.prompt_logprobs, "prompt_logprobs")
        info = service.engine.info
        params = sampling_params(
            asked,
            max_tokens=fit_context(len(prompt), asked.limit, None, info.max_model_len, "messages"),
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            prompt_logprobs=asked.prompt_logprobs,
            info=info,
            defaults=service.tokenizer.sampling_defaults,
        )
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        markers = parser_class.special_markers if parser_class else ()
        kept_ids = service.tokenizer.ids_of(markers)
        choices = make_choices(service, asked, prompt, params, answer_id, caller, keep_special_ids=kept_ids)
        answer = ChatAnswer(service, asked, answer_id, model, choices, parser_class)
        if asked.stream:
            events = answer.chunks()
            return await stream_events(request, events, keep_alive_s=service.keep_alive_s)
        return json_response(await answer.whole())


def _tool_parser(request: ChatRequest, config: ServerConfig) -> type[HermesParser] | None:
    """The parser that the answer's text goes through, if tools are offered."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    if choice not in (None, "auto"):
        raise RequestError(
            'tool_choice: only "none" and "auto" are supported', param="tool_choice", code="unsupported_parameter"
        )
    if config.tool_call_parser is None:
        raise RequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            param="tool_choice",
        )
    return tool_parser_class(config.tool_call_parser)


class AnswerText:
    """One choice's text, with the tool calls in it set apart."""

    def __init__(self, parser: HermesParser | None) -> None:
        self._parser = parser
        self.num_calls = 0

    def push(self, piece: Piece) -> list[ChatDelta]:
        """What the piece adds, in order."""
        events: list[ToolEvent]
        if self._parser is None:
            events = [piece.text] if piece.text else []
        else:
            events = self._parser.push(piece.text)
            if piece.finish_reason is not None:
                events += self._parser.finish()
        return [self._delta(event) for event in events]

    def finish_reason(self, piece: Piece) -> FinishReason | None:
        """The piece's reason, in OpenAI's words."""
        return "tool_calls" if self.num_calls and piece.finish_reason == "stop" else piece.finish_reason

    def _delta(self, event: ToolEvent) -> ChatDelta:
        if isinstance(event, str):
            return ChatDelta(content=event)
        call = ToolCall(f"call_{uuid.uuid4().hex}", FunctionCall(event.name, event.arguments), index=self.num_calls)
        self.num_calls += 1
        return ChatDelta(tool_calls=[call])


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        answer_id: str,
        model: str,
        choices: list[Choice],
        parser_class: type[HermesParser] | None,
    ) -> None:
        self._service = service
        self._request = request
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._choices = choices
        self._texts = [AnswerText(parser_class() if parser_class else None) for _ in choices]

    async def chunks(self) -> AsyncGenerator[msgspec.Struct, None]:
        """The events of a streamed answer: role, text, and for each choice a chunk of its own that ends it."""
        begun: set[int] = set()
        options = self._request.stream_options
        with_usage = options is not None and options.continuous_usage_stats
        async with aclosing(run(self._service.engine, self._choices)) as pieces:
            async for piece in pieces:
                if piece.index not in begun:
                    begun.add(piece.index)
                    yield self._chunk(ChatChunkChoice(piece.index, ChatDelta(role="assistant", content="")), with_usage)
                for choice in self._piece_chunks(piece):
                    yield self._chunk(choice, with_usage)
        if options is not None and options.include_usage:
            yield ChatChunk(self._id, self._created, self._model, [], usage=self._usage())

    async def whole(self) -> ChatResponse:
        """The whole answer."""
        contents = [""] * len(self._choices)
        calls: list[list[ToolCall]] = [[] for _ in self._choices]
        logprobs: list[list[TokenLogprob]] = [[] for _ in self._choices]
        ends: list[Piece | None] = [None] * len(self._choices)
        of_prompt: PromptLogprobs | None = None
        async with aclosing(run(self._service.engine, self._choices)) as pieces:
            async for piece in pieces:
                for delta in self._texts[piece.index].push(piece):
                    contents[piece.index] += delta.content or ""
                    calls[piece.index] += delta.tool_calls or []
                if piece.logprobs:
                    logprobs[piece.index] += chat_logprobs(self._service.tokenizer, piece.logprobs).content
                if piece.prompt_logprobs is not None and of_prompt is None:
                    of_prompt = prompt_logprobs(self._service.tokenizer, piece.prompt_logprobs)
                if piece.finish_reason is not None:
                    ends[piece.index] = piece
        whole_choices = []
        for index, end in enumerate(ends):
            assert end is not None, "run() yields the last piece of every choice"
            reason = self._texts[index].finish_reason(end)
            assert reason is not None
            message = ChatMessage("assistant", contents[index] or (None if calls[index] else ""))
            if calls[index]:
                message.tool_calls = calls[index]
            shown = ChatLogprobs(logprobs[index]) if self._request.logprobs else None
            whole_choices.append(ChatChoice(index, message, shown, reason, end.stop_reason))
        response = ChatResponse(self._id, self._created, self._model, whole_choices, self._usage())
        if of_prompt is not None:
            response.prompt_logprobs = of_prompt
        return response

    def _piece_chunks(self, piece: Piece) -> list[ChatChunkChoice]:
        text = self._texts[piece.index]
        deltas = text.push(piece)
        logprobs = chat_logprobs(self._service.tokenizer, piece.logprobs) if piece.logprobs else None
        if logprobs and not deltas:
            deltas = [ChatDelta(content="")]
        chunks = [ChatChunkChoice(piece.index, delta) for delta in deltas]
        if logprobs:
            chunks[0].logprobs = logprobs
        if piece.finish_reason is not None:
            chunks.append(
                ChatChunkChoice(
                    piece.index, ChatDelta(), finish_reason=text.finish_reason(piece), stop_reason=piece.stop_reason
                )
            )
        return chunks

    def _chunk(self, choice: ChatChunkChoice, with_usage: bool) -> ChatChunk:
        chunk = ChatChunk(self._id, self._created, self._model, [choice])
        if with_usage:
            chunk.usage = self._usage()
        return chunk

    def _usage(self) -> Usage:
        prompt = self._choices[0].submit.prompt_token_ids
        num_tokens = sum(choice.output.num_tokens for choice in self._choices)
        first = self._choices[0].output
        return usage(len(prompt), num_tokens, first.cached_tokens, first.cached_host_tokens)
