"""POST /v1/chat/completions, and what every chat needs before there can be an answer.

Owns: what a chat request asks of the engine and of the parsers of its answer.
Does not know: what answers look like (chat_answer), how text is made (generation) or framed (sse).
"""

import uuid
from collections.abc import Callable

from aiohttp import web

from minserve.api.admission import PLACE
from minserve.api.auth import CALLER, Caller
from minserve.api.body import read_json
from minserve.api.chat_answer import Chat, ChatAnswer
from minserve.api.http import json_response
from minserve.api.prepare import encode_text, make_choices, render_chat
from minserve.api.sampling import check_prompt_logprobs, fit_context, sampling_params
from minserve.api.schemas import ChatRequest, parse
from minserve.api.service import SERVICE, Service
from minserve.api.sse import stream_events
from minserve.api.structured import answer_grammar, calls_of
from minserve.engine.limits import refuse_sparse
from minserve.text import reasoning
from minserve.text.answer import AnswerParser
from minserve.text.reasoning import Begin, ReasoningFormat
from minserve.text.toolcalls import ToolParser, tool_parser_class


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, whole or streamed."""
    service = request.app[SERVICE]
    asked = parse(await read_json(request), ChatRequest)
    model = service.check_model(asked.model)
    refuse_sparse(asked.sparse, service.engine.info)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    request[PLACE].take(asked.n)
    chat = await prepare_chat(service, asked, answer_id, request[CALLER])
    answer = ChatAnswer(service, asked, answer_id, model, chat)
    if asked.stream:
        events = answer.chunks()
        return await stream_events(request, events, keep_alive_s=service.keep_alive_s)
    return json_response(await answer.whole())


async def prepare_chat(service: Service, asked: ChatRequest, answer_id: str, caller: Caller) -> Chat:
    """The choices that will answer a chat, and the parsers of their texts. Raises RequestError."""
    configured = service.config.tool_call_parser
    calls = calls_of(asked, None if configured is None else tool_parser_class(configured))
    tools = calls.parser
    thinks = service.reasoning if asked.separate_reasoning else None
    text = await render_chat(service, asked, asked.messages)
    grammar = await answer_grammar(service, asked, calls, _begin(service, asked, text))
    prompt = await encode_text(service, text, add_special_tokens=asked.add_special_tokens, param="messages")
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
    markers = [*(tools.special_markers if tools else ()), *(reasoning.MARKERS if thinks else ())]
    kept_ids = service.tokenizer.ids_of(markers)
    choices = make_choices(
        service, asked, prompt, params, answer_id, caller, keep_special_ids=kept_ids, grammar=grammar
    )
    new_parser = _parsers(asked, text, thinks, tools)
    return Chat(choices, [new_parser() for _ in choices])


def _parsers(
    request: ChatRequest, prompt: str, thinks: ReasoningFormat | None, tools: type[ToolParser] | None
) -> Callable[[], AnswerParser]:
    """A maker of parsers for the answers to one prompt."""
    names = frozenset(str(tool["function"]["name"]) for tool in request.tools)

    def new_parser() -> AnswerParser:
        return AnswerParser(
            thinks.parser_after(prompt, _continued(request)) if thinks else None,
            tools(names) if tools else None,
        )

    return new_parser


def _begin(service: Service, request: ChatRequest, prompt: str) -> Begin:
    """Where the answer begins. A model reasons whether the client wants that set apart or not."""
    return service.reasoning.begin_after(prompt, _continued(request)) if service.reasoning else "closed"


def _continued(request: ChatRequest) -> str:
    """The text of the message that the answer goes on with."""
    content = request.messages[-1].content if request.continue_final_message else None
    return content if isinstance(content, str) else ""
