"""The answer to a chat, whole or as the events of a stream.

Owns: the chat shapes: what becomes of reasoning, prose, calls and logprobs, and the usage.
Does not know: what was asked of the engine (chat), how text is made (generation) or framed (sse).
"""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from minserve.api.generation import Choice, drafts_of, run, sparse_of
from minserve.api.logprobs import chat_logprobs, prompt_logprobs
from minserve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    CompletionTokensDetails,
    FunctionCall,
    FunctionCallDelta,
    PromptLogprobs,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
    usage,
)
from minserve.api.schemas import ChatRequest
from minserve.api.service import Service
from minserve.text.answer import AnswerEvent, AnswerParser
from minserve.text.jsoncall import CallArguments, CallStart
from minserve.text.output import Piece
from minserve.text.reasoning import Reasoning


class Chat(NamedTuple):
    """What a chat comes to: texts of the engine's, and a parser for each."""

    choices: Sequence[Choice]
    parsers: Sequence[AnswerParser]

    def usage(self, *, counts_reasoning: bool) -> Usage:
        """The token counts so far, of all choices together."""
        prompt = self.choices[0].submit.prompt_token_ids
        num_tokens = sum(choice.output.num_tokens for choice in self.choices)
        first = self.choices[0].output
        counts = usage(
            len(prompt),
            num_tokens,
            first.cached_tokens,
            first.cached_host_tokens,
            drafts_of(self.choices),
            sparse_of(self.choices),
        )
        if counts_reasoning:
            num_reasoning = sum(parser.num_reasoning_tokens for parser in self.parsers)
            counts.completion_tokens_details = CompletionTokensDetails(num_reasoning)
        return counts


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(self, service: Service, request: ChatRequest, answer_id: str, model: str, chat: Chat) -> None:
        self._service = service
        self._request = request
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._chat = chat
        self._choices, self._parsers = chat

    async def chunks(self) -> AsyncGenerator[msgspec.Struct, None]:
        """The events of a streamed answer: role, what is said, and for each choice a chunk of its own that ends it."""
        streams = [ChoiceStream(parser) for parser in self._parsers]
        begun: set[int] = set()
        options = self._request.stream_options
        with_usage = options is not None and options.continuous_usage_stats
        async with aclosing(run(self._service.engine, self._choices)) as pieces:
            async for piece in pieces:
                if piece.index not in begun:
                    begun.add(piece.index)
                    yield self._chunk(ChatChunkChoice(piece.index, ChatDelta(role="assistant", content="")), with_usage)
                logprobs = chat_logprobs(self._service.tokenizer, piece.logprobs) if piece.logprobs else None
                events = self._shown(self._parsers[piece.index].push(piece))
                for choice in streams[piece.index].chunks(piece, events, logprobs):
                    yield self._chunk(choice, with_usage)
        if options is not None and options.include_usage:
            yield ChatChunk(self._id, self._created, self._model, [], usage=self._usage())

    async def whole(self) -> ChatResponse:
        """The whole answer."""
        messages = [MessageParts() for _ in self._choices]
        logprobs: list[list[TokenLogprob]] = [[] for _ in self._choices]
        ends: list[Piece | None] = [None] * len(self._choices)
        of_prompt: PromptLogprobs | None = None
        async with aclosing(run(self._service.engine, self._choices)) as pieces:
            async for piece in pieces:
                messages[piece.index].add(self._shown(self._parsers[piece.index].push(piece)))
                if piece.logprobs:
                    logprobs[piece.index] += chat_logprobs(self._service.tokenizer, piece.logprobs).content
                if piece.prompt_logprobs is not None and of_prompt is None:
                    of_prompt = prompt_logprobs(self._service.tokenizer, piece.prompt_logprobs)
                if piece.finish_reason is not None:
                    ends[piece.index] = piece
        choices = []
        for index, end in enumerate(ends):
            assert end is not None, "run() yields the last piece of every choice"
            reason = self._parsers[index].finish_reason(end)
            assert reason is not None
            message = messages[index].message(splits_reasoning=self._service.reasoning is not None)
            shown = ChatLogprobs(logprobs[index]) if self._request.logprobs else None
            choices.append(ChatChoice(index, message, shown, reason, end.stop_reason))
        response = ChatResponse(self._id, self._created, self._model, choices, self._usage())
        if of_prompt is not None:
            response.prompt_logprobs = of_prompt
        return response

    def _shown(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if self._request.include_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

    def _chunk(self, choice: ChatChunkChoice, with_usage: bool) -> ChatChunk:
        chunk = ChatChunk(self._id, self._created, self._model, [choice])
        if with_usage:
            chunk.usage = self._usage()
        return chunk

    def _usage(self) -> Usage:
        return self._chat.usage(counts_reasoning=self._service.reasoning is not None)


class ChoiceStream:
    """One choice as chunks."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def chunks(self, piece: Piece, events: list[AnswerEvent], logprobs: ChatLogprobs | None) -> list[ChatChunkChoice]:
        """What a piece and the events that it gave add. Logprobs come even where no text does yet."""
        deltas = [self._delta(event) for event in events]
        if logprobs and not deltas:
            deltas = [ChatDelta(content="")]
        chunks = [ChatChunkChoice(piece.index, delta) for delta in deltas]
        if logprobs:
            chunks[0].logprobs = logprobs
        if (reason := self._parser.finish_reason(piece)) is not None:
            end = ChatChunkChoice(piece.index, ChatDelta(), finish_reason=reason, stop_reason=piece.stop_reason)
            chunks.append(end)
        return chunks

    def _delta(self, event: AnswerEvent) -> ChatDelta:
        match event:
            case Reasoning(text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case CallStart(name):
                function = FunctionCallDelta("", name)
                call = ToolCallDelta(self._num_calls, function, id=new_call_id(), type="function")
                self._num_calls += 1
                return ChatDelta(tool_calls=[call])
            case CallArguments(text):
                return ChatDelta(tool_calls=[ToolCallDelta(self._num_calls - 1, FunctionCallDelta(text))])
            case text:
                return ChatDelta(content=text)


class MessageParts:
    """One choice as a message in the making."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, events: list[AnswerEvent]) -> None:
        """What comes next."""
        for event in events:
            match event:
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStart(name):
                    self._calls.append((name, []))
                case CallArguments(text):
                    self._calls[-1][1].append(text)
                case text:
                    self._content.append(text)

    def message(self, *, splits_reasoning: bool) -> ChatMessage:
        """All of it. The content is null where there is something else instead."""
        reasoning = "".join(self._reasoning) or None
        instead = None if self._calls or reasoning else ""
        message = ChatMessage("assistant", "".join(self._content) or instead)
        if splits_reasoning:
            message.reasoning = message.reasoning_content = reasoning
        if self._calls:
            message.tool_calls = [
                ToolCall(new_call_id(), FunctionCall(name, "".join(parts))) for name, parts in self._calls
            ]
        return message


def new_call_id() -> str:
    """The name of a call, by which its result is sent back."""
    return f"call_{uuid.uuid4().hex}"
