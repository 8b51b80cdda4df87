"""What clients may send to /v1/responses.

Owns: the fields, the kinds of items and of their parts, and what is refused because nothing is stored here.
Does not know: chats (items_chat), the bounds of sampling (schemas), HTTP.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from minserve.api.schemas import INSTEAD, NOT_SUPPORTED, NumTokens, SamplingRequest, TemplateKwargs, Tools
from minserve.api.strict_json import convert
from minserve.errors import RequestError

_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)]
User = Annotated[str, Meta(max_length=512)]
Items = Annotated[list[dict[str, Any]], Meta(min_length=1)]

_ALL_ITEMS = "input, with all items of the conversation"

ITEMS_NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **NOT_SUPPORTED,
    "background": (False,),
    "truncation": ("disabled",),
    "include": ([],),
    "top_logprobs": (0,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "n": (1,),
    "enable_response_messages": (False,),
    **dict.fromkeys(
        (
            "previous_response_id", "conversation", "prompt", "max_tool_calls", "context_management", "messages",
            "max_tokens", "max_completion_tokens", "response_format", "logprobs", "prompt_logprobs",
            "previous_input_messages",
        ),
        (),
    ),
}  # fmt: skip


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the text must be. Name, description and strict are as in a chat's json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """verbosity is not supported."""

    format: TextFormat = TextFormat("text")
    verbosity: None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of these are not supported, as in a chat: how much a model reasons is for chat_template_kwargs to say."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(SamplingRequest, frozen=True, kw_only=True):
    """POST /v1/responses. input: the user's text, or a list of items; each is checked when it becomes a message."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = ITEMS_NOT_SUPPORTED
    instead: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        "previous_response_id": _ALL_ITEMS,
        "conversation": _ALL_ITEMS,
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "prompt": "input and instructions",
    }

    input: str | Items
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: Tools = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    store: Annotated[bool, Meta(extra_json_schema={"const": False})] = False
    metadata: Metadata = {}
    user: User | None = None
    chat_template_kwargs: TemplateKwargs = {}


class MessageItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message: what a client writes, or an answer of ours that is sent back."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    id: str | None = None
    type: Literal["message"] = "message"
    status: str | None = None


class CallItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the model has made. arguments: JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class ReasoningItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model has thought; templates decide what is left of it. A summary is none of the model's words."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    id: str | None = None
    status: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call: the members of a chat's tool, without a level between."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem

_KINDS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}

_TEXT_PARTS = ("input_text", "output_text", "text")


def read_item(item: dict[str, Any], where: str) -> InputItem:
    """An item of the input. Raises RequestError with the path of what is wrong."""
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise RequestError(f"{where}.type: items may be {', '.join(_KINDS)}", param=f"{where}.type")
    return convert(_given(item), _KINDS[kind], where)


def read_tool(tool: dict[str, Any], where: str) -> FunctionTool:
    """A tool. Raises RequestError with the path of what is wrong."""
    if tool.get("type") != "function":
        raise RequestError(f'{where}.type: only tools of the type "function" are supported', param=f"{where}.type")
    return convert(_given(tool), FunctionTool, where)


def read_texts(content: str | list[dict[str, Any]], where: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> list[str]:
    """The texts of a content. Raises RequestError with the path of a part that is not of one of these kinds."""
    if isinstance(content, str):
        return [content]
    for index, part in enumerate(content):
        if part.get("type") not in kinds:
            param = f"{where}[{index}].type"
            raise RequestError(f"{param}: this model takes parts of the type {' or '.join(kinds)}", param=param)
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{index}].text must be a string", param=f"{where}[{index}].text")
    return [part["text"] for part in content]


def _given(value: dict[str, Any]) -> dict[str, Any]:
    """Clients send what we have sent with all the members that they know of, most of them null."""
    return {name: member for name, member in value.items() if member is not None}
