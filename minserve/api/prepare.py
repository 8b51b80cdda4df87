"""From a checked request to token ids and to the choices that the engine will run.

Owns: what a chat's messages look like to a template, and when text is tokenized off the event loop.
Does not know: how answers are shaped.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from minserve.api.auth import Caller
from minserve.api.generation import Choice
from minserve.api.messages import Message, Tool
from minserve.api.sampling import check_token_ids, choice_seed, context_overflow
from minserve.api.schemas import ChatRequest, GenerationRequest, TokenizeRequest
from minserve.api.service import Service
from minserve.api.strict_json import convert
from minserve.errors import RequestError
from minserve.protocol import SamplingParams, Submit
from minserve.text.detokenizer import Detokenizer
from minserve.text.output import Output


async def encode_text(service: Service, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a text. Raises RequestError, before the work, for one that obviously cannot fit."""
    max_model_len = service.engine.info.max_model_len
    at_least = service.tokenizer.min_tokens_lower_bound(text)
    if at_least >= max_model_len:
        raise context_overflow(f"at least {at_least}", max_model_len, param)
    await service.turns.next()
    token_ids = await service.off_loop(
        len(text), lambda: service.tokenizer.encode(text, add_special_tokens=add_special_tokens, param=param)
    )
    # A tokenizer may have more tokens than its model.
    check_token_ids(token_ids, service.engine.info.vocab_size, param)
    return token_ids


async def render_chat(service: Service, request: ChatRequest | TokenizeRequest, messages: Sequence[Message]) -> str:
    """A chat as the model's template writes it."""
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message
    max_model_len = service.engine.info.max_model_len
    if len(messages) >= max_model_len:
        raise context_overflow(f"at least {len(messages)}", max_model_len, "messages")
    return await service.renderer.render(
        {
            "messages": [_template_message(message, index) for index, message in enumerate(messages)],
            "tools": _checked_tools(request) or None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": request.continue_final_message,
            "template_kwargs": request.chat_template_kwargs,
        }
    )


def make_choices(
    service: Service,
    request: GenerationRequest,
    prompt_token_ids: list[int],
    params: SamplingParams,
    answer_id: str,
    caller: Caller,
    *,
    first_index: int = 0,
    keep_special_ids: frozenset[int] = frozenset(),
    grammar: str | None = None,
) -> list[Choice]:
    """The n choices of one prompt. They differ in their index and seed only."""
    choices = []
    for number in range(request.n):
        index = first_index + number
        detokenizer = Detokenizer(
            service.tokenizer,
            prompt_token_ids,
            stop=request.stop_strings,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            keep_special_ids=keep_special_ids,
            min_tokens=request.min_tokens,
        )
        submit = Submit(
            request_id=f"{answer_id}-{index}",
            prompt_token_ids=prompt_token_ids,
            params=msgspec.structs.replace(params, seed=choice_seed(params.seed, number)),
            cache_salt=caller.salt(request.cache_salt),
            grammar=grammar,
            sparse=request.sparse,
        )
        output = Output(index, submit.params, detokenizer)
        choices.append(Choice(submit, output, service.metrics.start(len(prompt_token_ids)), caller, service.in_flight))
    return choices


def _checked_tools(request: ChatRequest | TokenizeRequest) -> list[dict[str, Any]]:
    """The tools that the template is shown. With tool_choice "none" it is shown none."""
    for index, tool in enumerate(request.tools):
        where = f"tools[{index}]"
        checked = convert(tool, Tool, where)
        if checked.function.strict and not (isinstance(request, ChatRequest) and request.forces_call):
            name = f"{where}.function.strict"
            raise RequestError(
                f'{name} is not supported unless tool_choice is "required" or a function: false or absent',
                param=name,
                code="unsupported_parameter",
            )
    if isinstance(request, ChatRequest) and request.tool_choice == "none":
        return []
    return request.tools


def _template_message(message: Message, index: int) -> dict[str, Any]:
    """The message as templates know it: "developer" is OpenAI's newer word for "system"; content is always there.

    An answer of ours has no content if it is a call, or if it was cut while the model reasoned.
    """
    reasoning = message.reasoning_content or message.reasoning
    if message.content is None and not (message.role == "assistant" and (message.tool_calls or reasoning)):
        raise RequestError(f"messages[{index}].content is missing", param=f"messages[{index}].content")
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": "" if message.content is None else message.content,
    }
    if message.tool_calls:
        shown["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning,
    }
    return shown | {name: value for name, value in optional.items() if value is not None}
