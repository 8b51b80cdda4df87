"""Messages of a conversation as chat templates expect them.

Owns: what becomes of nulls, content parts, the arguments of calls and the names of reasoning.
Does not know: templates (chat), the types that clients may send (api.messages).
"""

import json
from collections.abc import Mapping
from typing import Any

from minserve.errors import RequestError

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""A message's reasoning goes by several names; templates read the first, gpt-oss's the second."""


def normalize_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as templates expect it: no nulls, text for content, objects for arguments, reasoning by its names."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list):
        plain["content"] = _join_parts(plain["content"], f"{where}.content")
    if isinstance(plain.get("tool_calls"), list):
        calls = plain["tool_calls"]
        plain["tool_calls"] = [_parse_arguments(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _join_parts(parts: list[Any], where: str) -> str:
    """The texts of list content with a space between them, as transformers serves them."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                f"{where}[{index}].type is {kind!r}; this model takes parts of type 'text' only",
                param=f"{where}[{index}].type",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{index}].text must be a string", param=f"{where}[{index}].text")
        texts.append(part["text"])
    return " ".join(texts)


def _parse_arguments(call: Any, where: str) -> Any:
    """The call with its function.arguments as an object. OpenAI's are a string, which templates would quote again."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
    param = f"{where}.function.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # Clients send an empty string for a call without arguments.
            arguments = json.loads(arguments, parse_constant=_refuse_constant) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not valid JSON: {error}", param=param) from error
    if arguments is not None and not isinstance(arguments, dict):
        raise RequestError(f"{param} must be a JSON object, or a string that holds one", param=param)
    return {**call, "function": function if arguments is None else {**function, "arguments": arguments}}


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        if (arguments := call["function"].get("arguments")) is not None
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
