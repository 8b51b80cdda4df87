"""What a request says its answer must look like: response_format, structured_outputs, tool_choice.

Owns: which fields these are, which of them go together, and the field that a fault is blamed on.
Does not know: how grammars are written (text.grammars) or tried (text.grammar_check).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from minserve.api.messages import Tool
from minserve.api.schemas import ChatRequest, GenerationRequest
from minserve.api.service import Service
from minserve.api.strict_json import convert
from minserve.errors import RequestError
from minserve.text import grammars
from minserve.text.grammars import Part
from minserve.text.reasoning import Begin
from minserve.text.toolcalls import CallFormat, HermesParser, ToolParser

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Calls(NamedTuple):
    """What of an answer may be calls. parser: reads them; tools: those that a grammar writes out; forced: nothing but
    calls is an answer; several: more than one."""

    parser: type[ToolParser] | None = None
    tools: Sequence[tuple[int, Tool]] = ()
    forced: bool = False
    several: bool = True


async def answer_grammar(service: Service, request: GenerationRequest, calls: Calls, begin: Begin) -> str | None:
    """The grammar of the answers to a request; None if anything may be said. begin: where the answer begins.

    Raises RequestError, with the field, for what cannot be compiled.
    """
    param, answer = _answer_part(request)
    if answer is None and not calls.forced:
        return None
    if calls.forced:
        answer = None
    tools = [grammars.Tool(tool.function.name, _parameters(tool, number)) for number, tool in calls.tools]
    form: CallFormat = (calls.parser or HermesParser).call_format
    pieces = [] if answer is None else [(param, answer)]
    pieces += [
        (f"tools[{number}].function.parameters", grammars.json_part(tool.parameters))
        for (number, _), tool in zip(calls.tools, tools, strict=True)
    ]
    param = "tools" if answer is None else param
    try:
        grammar = grammars.whole(answer, tools, form, several=calls.several, begin=begin)
        return await service.grammars.check(grammar, param)
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param=param) from None
    except RequestError:
        if len(pieces) > 1 or param == "tools":
            for own, part in pieces:  # one of them is to blame, unless it is all of them together
                await service.grammars.check(grammars.alone(part), own)
        raise


def calls_of(request: ChatRequest, configured: type[ToolParser] | None) -> Calls:
    """What the request's tools and its tool_choice mean for the answer. configured: the parser that the server has.

    A forced call needs no flag: the format is ours to choose where none is configured.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return Calls()
    if choice == "none":
        return Calls()
    offered = [(number, convert(tool, Tool, f"tools[{number}]")) for number, tool in enumerate(request.tools)]
    if request.forces_call:
        name = None if choice == "required" else _chosen_name(choice)
        tools = [entry for entry in offered if name in (None, entry[1].function.name)]
        if not tools:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        several = name is None and request.parallel_tool_calls
        return Calls(configured or HermesParser, tools, forced=True, several=several)
    if choice not in (None, "auto"):
        raise RequestError(
            'tool_choice may be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if configured is None:
        raise RequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            param="tool_choice",
        )
    if not request.parallel_tool_calls:
        raise RequestError(
            'parallel_tool_calls may be false if tool_choice is "required" or a function; else true or absent',
            param="parallel_tool_calls",
            code="unsupported_parameter",
        )
    return Calls(configured, offered)


def _answer_part(request: GenerationRequest) -> tuple[str, Part | None]:
    """(the field, what it says): how the prose of an answer must look."""
    form, outputs = request.response_format, request.structured_outputs
    if form is not None and form.type != "json_schema" and form.json_schema is not None:
        raise RequestError("response_format.json_schema needs the type json_schema", param="response_format.type")
    if form is None or form.type == "text":
        return ("", None) if outputs is None else _outputs_part(request)
    if outputs is not None:
        raise RequestError("response_format and structured_outputs exclude each other", param="structured_outputs")
    if form.type == "json_object":
        return "response_format", grammars.json_part(grammars.ANY_OBJECT)
    param = "response_format.json_schema"
    if form.json_schema is None:
        raise RequestError(f"{param} is missing", param=param)
    return f"{param}.schema", grammars.json_part(form.json_schema.schema)


def _outputs_part(request: GenerationRequest) -> tuple[str, Part]:
    outputs = request.structured_outputs
    assert outputs is not None
    given = [name for name in outputs.__struct_fields__ if getattr(outputs, name) not in (None, False)]
    if outputs.json is False:
        given.append("json")
    if len(given) != 1:
        names = ", ".join(outputs.__struct_fields__)
        raise RequestError(f"structured_outputs must have exactly one of {names}", param="structured_outputs")
    param = f"structured_outputs.{given[0]}"
    if outputs.json is not None:
        return param, grammars.json_part(_schema(outputs.json, param))
    if outputs.regex is not None:
        return param, grammars.regex_part(outputs.regex)
    if outputs.choice is not None:
        return param, grammars.choice_part(outputs.choice)
    if outputs.grammar is not None:
        return param, grammars.grammar_part(outputs.grammar)
    return param, grammars.json_part(grammars.ANY_OBJECT)


def _schema(value: dict[str, Any] | bool | str, param: str) -> dict[str, Any] | bool:
    """A schema, which vLLM also takes as the text of one."""
    if not isinstance(value, str):
        return value
    try:
        schema: dict[str, Any] | bool = msgspec.json.decode(value, type=dict[str, Any] | bool)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON schema: {error}", param=param) from None
    return schema


def _chosen_name(choice: Any) -> str:
    """The function that a tool_choice names."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise RequestError(
            'a tool_choice that is an object must be {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return name


def _parameters(tool: Tool, number: int) -> Mapping[str, Any]:
    """What a tool's arguments must be. They are always an object: a function that names no parameters has none."""
    parameters = tool.function.parameters
    if parameters is None:
        return _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        param = f"tools[{number}].function.parameters.type"
        raise RequestError(f'{param} must be "object"', param=param)
    return {**parameters, "type": "object"}
