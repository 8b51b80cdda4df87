"""Messages and tools of a chat as clients send them.

Owns: their fields and types. Does not know: what templates make of them (prepare).
"""

from typing import Any, Literal

import msgspec


class FunctionCall(msgspec.Struct, frozen=True):
    """A call in the history: arguments as the JSON text that the model wrote."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an assistant message of the history. Other members, such as the index of streams, are dropped."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat, as clients send it, including what they send back of our own answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of a request; checked here, but templates are given the client's own dict."""

    type: Literal["function"]
    function: ToolFunction
