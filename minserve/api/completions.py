"""POST /v1/completions.

Owns: the forms of a prompt, echo, and the completion shapes of whole and streamed answers.
Does not know: how text is made (generation) or framed (sse).
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import msgspec
from aiohttp import web
from msgspec import UNSET

from minserve.api.admission import PLACE
from minserve.api.auth import CALLER, Caller
from minserve.api.body import read_json
from minserve.api.generation import Choice, drafts_of, run, sparse_of
from minserve.api.http import json_response
from minserve.api.logprobs import completion_logprobs, prompt_logprobs
from minserve.api.prepare import encode_text, make_choices
from minserve.api.responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
    usage,
)
from minserve.api.sampling import check_prompt_logprobs, check_token_ids, context_overflow, fit_context, sampling_params
from minserve.api.schemas import MAX_CHOICES, CompletionRequest, parse
from minserve.api.service import SERVICE, Service
from minserve.api.sse import stream_events
from minserve.api.structured import Calls, answer_grammar
from minserve.engine.limits import refuse_sparse
from minserve.errors import RequestError
from minserve.protocol import Ready
from minserve.text.detokenizer import Detokenizer
from minserve.text.output import Piece
from minserve.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

Prompt = str | list[int]


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, whole or streamed."""
    service = request.app[SERVICE]
    asked = parse(await read_json(request), CompletionRequest)
    model = service.check_model(asked.model)
    refuse_sparse(asked.sparse, service.engine.info)
    prompts = _prompts(asked.prompt, service.engine.info)
    if len(prompts) * asked.n > MAX_CHOICES:
        raise RequestError(
            f"prompts times n may be at most {MAX_CHOICES}, got {len(prompts) * asked.n}", param="prompt"
        )
    if asked.echo and asked.logprobs is not None and asked.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be combined with echo and logprobs", param="prompt_logprobs")
    caller = request[CALLER]
    param = "n" if asked.n > 1 else "prompt"
    request[PLACE].take(len(prompts) * asked.n, param)
    answer = await _prepare(service, asked, prompts, model, caller)
    if asked.stream:
        events = answer.chunks()
        return await stream_events(request, events, keep_alive_s=service.keep_alive_s)
    return json_response(await answer.whole())


def _prompts(prompt: str | list[object], info: Ready) -> list[Prompt]:
    """The prompts of a request in any of OpenAI's four forms: text, texts, token ids, lists of token ids.

    Lists are counted before their members are looked at.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if type(prompt[0]) is int:
        prompt = [prompt]
    if len(prompt) > MAX_CHOICES:
        raise RequestError(f"prompt may hold at most {MAX_CHOICES} prompts, got {len(prompt)}", param="prompt")
    prompts: list[Prompt] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and len(item) >= info.max_model_len:
            raise context_overflow(f"{len(item)}", info.max_model_len, "prompt")
        elif isinstance(item, list) and all(type(token_id) is int for token_id in item):
            check_token_ids(item, info.vocab_size, "prompt")
            prompts.append(item)
        else:
            raise RequestError(
                "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
                param="prompt",
            )
    if len({type(item) for item in prompts}) > 1:
        raise RequestError("prompt must not mix strings and token ids", param="prompt")
    return prompts


async def _prepare(
    service: Service, request: CompletionRequest, prompts: list[Prompt], model: str, caller: Caller
) -> "CompletionAnswer":
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    choices: list[Choice] = []
    echoes: list[Echo | None] = []
    info = service.engine.info
    num_prompt_tokens = 0
    grammar = await answer_grammar(service, request, Calls(), "closed")
    for prompt in prompts:
        if isinstance(prompt, str):
            token_ids = await encode_text(
                service, prompt, add_special_tokens=request.add_special_tokens, param="prompt"
            )
        else:
            token_ids = prompt
        if not token_ids:
            raise RequestError("prompt must not be empty", param="prompt")
        num_prompt_tokens += len(token_ids) * request.n
        echoed = request.echo and request.logprobs is not None
        of_prompt = request.logprobs if echoed else request.prompt_logprobs
        check_prompt_logprobs(num_prompt_tokens, of_prompt, "logprobs" if echoed else "prompt_logprobs")
        params = sampling_params(
            request,
            max_tokens=fit_context(len(token_ids), request.limit, DEFAULT_MAX_TOKENS, info.max_model_len, "prompt"),
            logprobs=request.logprobs,
            prompt_logprobs=of_prompt,
            info=info,
            defaults=service.tokenizer.sampling_defaults,
        )
        echo = await service.off_loop(len(token_ids), partial(Echo.of, service.tokenizer, request, prompt, token_ids))
        echoes += [echo] * request.n
        choices += make_choices(
            service, request, token_ids, params, answer_id, caller, first_index=len(choices), grammar=grammar
        )
    return CompletionAnswer(service, request, answer_id, model, choices, echoes)


class Echo(msgspec.Struct, frozen=True):
    """A prompt that the answer begins with. offsets: where each of its tokens begins in the text."""

    text: str
    offsets: list[int]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, request: CompletionRequest, prompt: Prompt, token_ids: list[int]
    ) -> "Echo | None":
        """The echo of a prompt, if the request wants one. A text is echoed as it was sent."""
        if not request.echo:
            return None
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=request.skip_special_tokens)
        update = detokenizer.push(token_ids)
        return cls(prompt if isinstance(prompt, str) else update.text + detokenizer.finish(), update.offsets)


class CompletionAnswer:
    """The answer to one completion request: n choices of each prompt, in the order of the prompts."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        answer_id: str,
        model: str,
        choices: list[Choice],
        echoes: "list[Echo | None]",
    ) -> None:
        self._service = service
        self._request = request
        self._id = answer_id
        self._model = model
        self._created = int(time.time())
        self._choices = choices
        self._echoes = echoes

    async def chunks(self) -> AsyncGenerator[msgspec.Struct, None]:
        """The events of a streamed answer: text, and for each choice a chunk of its own that ends it."""
        begun: set[int] = set()
        options = self._request.stream_options
        with_usage = options is not None and options.continuous_usage_stats
        async with aclosing(run(self._service.engine, self._choices)) as pieces:
            async for piece in pieces:
                first = piece.index not in begun
                begun.add(piece.index)
                text, logprobs = self._content(piece, first=first)
                if text or logprobs is not None:
                    yield self._response([CompletionChoice(piece.index, text, logprobs)], with_usage)
                if piece.finish_reason is not None:
                    end = CompletionChoice(
                        piece.index, "", finish_reason=piece.finish_reason, stop_reason=piece.stop_reason
                    )
                    yield self._response([end], with_usage)
        if options is not None and options.include_usage:
            yield self._response([], True)

    async def whole(self) -> CompletionResponse:
        """The whole answer."""
        choices = [CompletionChoice(index, "") for index in range(len(self._choices))]
        async with aclosing(run(self._service.engine, self._choices)) as pieces:
            begun: set[int] = set()
            async for piece in pieces:
                choice = choices[piece.index]
                text, logprobs = self._content(piece, first=piece.index not in begun)
                begun.add(piece.index)
                choice.text += text
                choice.logprobs = _joined(choice.logprobs, logprobs)
                if piece.prompt_logprobs is not None and self._request.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_logprobs(self._service.tokenizer, piece.prompt_logprobs)
                if piece.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        return self._response(choices, True)

    def _content(self, piece: Piece, *, first: bool) -> tuple[str, CompletionLogprobs | None]:
        """The text and logprobs that a piece adds; the first one of a choice brings the echoed prompt."""
        tokenizer = self._service.tokenizer
        echo = self._echoes[piece.index]
        begin = 0 if echo is None else len(echo.text)
        logprobs = None
        if piece.logprobs:
            offsets = [begin + offset for offset in piece.text_offsets]
            logprobs = completion_logprobs(tokenizer, piece.token_ids, piece.logprobs, offsets)
        if not first or echo is None:
            return piece.text, logprobs
        if piece.prompt_logprobs is not None and self._request.logprobs is not None:
            prompt = self._choices[piece.index].submit.prompt_token_ids
            of_prompt = completion_logprobs(tokenizer, prompt, piece.prompt_logprobs, echo.offsets)
            logprobs = _joined(of_prompt, logprobs)
        return echo.text + piece.text, logprobs

    def _response(self, choices: list[CompletionChoice], with_usage: bool) -> CompletionResponse:
        return CompletionResponse(
            self._id, self._created, self._model, choices, usage=self._usage() if with_usage else UNSET
        )

    def _usage(self) -> Usage:
        # Each prompt is counted once, whatever n.
        per_prompt = self._choices[:: self._request.n]
        return usage(
            sum(len(choice.submit.prompt_token_ids) for choice in per_prompt),
            sum(choice.output.num_tokens for choice in self._choices),
            sum(choice.output.cached_tokens for choice in per_prompt),
            sum(choice.output.cached_host_tokens for choice in per_prompt),
            drafts_of(self._choices),
            sparse_of(self._choices),
        )


def _joined(left: CompletionLogprobs | None, right: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if left is None or right is None:
        return left if right is None else right
    left.tokens += right.tokens
    left.token_logprobs += right.token_logprobs
    left.top_logprobs += right.top_logprobs
    left.text_offset += right.text_offset
    return left
