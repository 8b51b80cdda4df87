"""A request of /v1/responses as the chat that it is.

Owns: which messages items become, and what the client calls the fields that a fault is found in.
Does not know: how chats are answered, what answers look like.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from minserve.api.items_request import (
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    read_item,
    read_texts,
    read_tool,
)
from minserve.api.messages import FunctionCall, Message, ToolCall
from minserve.api.schemas import ChatRequest, JsonSchema, ResponseFormat, SamplingRequest
from minserve.errors import RequestError

_TOOL_CHOICES = 'tool_choice may be "none", "auto", "required" or {"type": "function", "name": ...}'


class ItemsChat(NamedTuple):
    """request: the chat. names: paths in it -> what they are called in the client's request."""

    request: ChatRequest
    names: dict[str, str]

    @contextmanager
    def client_names(self) -> Iterator[None]:
        """Faults that are found in the chat are told in the client's words."""
        try:
            yield
        except RequestError as error:
            param = error.param or ""
            path = max((path for path in self.names if param.startswith(path)), key=len, default=None)
            if path is None:
                raise
            error.message = error.message.replace(path, self.names[path])
            error.param = self.names[path] + param.removeprefix(path)
            raise


def chat_of(asked: ResponsesRequest) -> ItemsChat:
    """The chat that a request stands for. Raises RequestError for items and tools that are malformed."""
    if asked.store:
        raise RequestError(
            "store: nothing is stored here; allowed: false or absent", param="store", code="unsupported_parameter"
        )
    if asked.max_output_tokens is not None and asked.min_tokens > asked.max_output_tokens:
        limit = f"max_output_tokens ({asked.max_output_tokens})"
        raise RequestError(f"min_tokens must be at most {limit}", param="min_tokens")
    messages, names = _messages(asked)
    names |= {"messages": "input", "max_tokens": "max_output_tokens"}
    names |= {"response_format.json_schema": "text.format", "response_format": "text.format"}
    names |= {f"tools[{index}].function": f"tools[{index}]" for index in range(len(asked.tools))}
    shared = {name: getattr(asked, name) for name in SamplingRequest.__struct_fields__}
    request = ChatRequest(
        **shared,
        messages=messages,
        max_tokens=asked.max_output_tokens,
        response_format=_response_format(asked.text.format),
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools)],
        tool_choice=_tool_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    return ItemsChat(request, names)


def _messages(asked: ResponsesRequest) -> tuple[list[Message], dict[str, str]]:
    history = _History()
    if asked.instructions is not None:
        history.add(Message(role="system", content=asked.instructions), "instructions")
    if isinstance(asked.input, str):
        history.add(Message(role="user", content=asked.input), "input")
        return history.messages, history.names
    for index, fields in enumerate(asked.input):
        where = f"input[{index}]"
        match read_item(fields, where):
            case MessageItem(role="assistant") as item:
                history.say(read_texts(item.content, f"{where}.content"), where)
            case MessageItem() as item:
                history.add(Message(role=item.role, content=_content(item.content, f"{where}.content")), where)
            case CallOutputItem() as item:
                content = _content(item.output, f"{where}.output")
                history.add(Message(role="tool", content=content, tool_call_id=item.call_id), where)
            case CallItem() as item:
                call = ToolCall(FunctionCall(item.name, item.arguments), id=item.call_id)
                history.call(call, where)
            case ReasoningItem() as item:
                history.think(read_texts(item.content, f"{where}.content", ("reasoning_text",)), where)
    history.end_turn()
    if not history.messages:
        raise RequestError("input holds no message", param="input")
    return history.messages, history.names


def _content(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    return _parts(read_texts(content, where))


def _parts(texts: list[str]) -> str | list[dict[str, Any]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


class _History:
    """Messages in the making. What a model has said in one turn is several items and one message, so that the template
    writes it as the model did: reasoning, then text and calls.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.names: dict[str, str] = {}
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, message: Message, where: str) -> None:
        """A message that is not the model's."""
        self.end_turn()
        self._name("", where)
        self.messages.append(message)

    def think(self, texts: list[str], where: str) -> None:
        """A turn begins with reasoning."""
        if self._texts or self._calls:
            self.end_turn()
        self._name("", where)
        self._thoughts += texts

    def say(self, texts: list[str], where: str) -> None:
        """Two texts with no call between them are two turns."""
        if self._texts and not self._calls:
            self.end_turn()
        self._name(".content", f"{where}.content")
        self._name("", where)
        self._texts += texts

    def call(self, call: ToolCall, where: str) -> None:
        """One more call of this turn."""
        self._name(f".tool_calls[{len(self._calls)}].function", where)
        self._name("", where)
        self._calls.append(call)

    def end_turn(self) -> None:
        """What comes next is not the model's, or of another turn."""
        reasoning = "".join(self._thoughts) or None
        if reasoning or self._texts or self._calls:
            self.messages.append(
                Message(
                    role="assistant",
                    content=_parts(self._texts) if self._texts else None,
                    reasoning_content=reasoning,
                    tool_calls=self._calls or None,
                )
            )
        self._thoughts, self._texts, self._calls = [], [], []

    def _name(self, path: str, where: str) -> None:
        self.names.setdefault(f"messages[{len(self.messages)}]{path}", where)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """The tool as templates know it."""
    checked = read_tool(tool, where)
    members = {
        "name": checked.name,
        "description": checked.description,
        "parameters": checked.parameters,
        "strict": checked.strict or None,  # false is the same as absent
    }
    return {"type": "function", "function": {name: value for name, value in members.items() if value is not None}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise RequestError(_TOOL_CHOICES, param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def _response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        if form.schema is not None:
            raise RequestError("text.format.schema needs the type json_schema", param="text.format.type")
        return ResponseFormat(form.type)
    if form.schema is None:
        raise RequestError("text.format.schema is missing", param="text.format.schema")
    return ResponseFormat(form.type, JsonSchema(form.schema, form.name, form.description, form.strict))
