"""What an answer must look like, as a grammar for llguidance.

Owns: how schemas, choices, expressions, tool calls and reasoning become one grammar.
Does not know: whether it can be compiled (grammar_check), which fields of a request said so (api.structured).

A grammar here is a list of parts, of which the first is the whole and names the others: a part keeps its own rules, and
so a client's grammar cannot meet ours.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from minserve.text import reasoning
from minserve.text.reasoning import Begin
from minserve.text.toolcalls import CallFormat

Part = dict[str, Any]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the tokens of JSON. A model that does not know how to begin would go on with blanks for ever."""


class Tool(msgspec.Struct, frozen=True):
    """A tool that may be called, and what its arguments must be: a schema of objects."""

    name: str
    parameters: Mapping[str, Any]


def json_part(schema: Mapping[str, Any] | bool) -> Part:
    """JSON that is valid under a schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}}


def regex_part(pattern: str) -> Part:
    """A text that an expression matches from its beginning to its end."""
    return {"lark_grammar": f"start: /{regex_to_lark(pattern)}/"}


def choice_part(choices: Sequence[str]) -> Part:
    """One of some texts."""
    return {"lark_grammar": "start: " + " | ".join(map(_quoted, choices))}


def grammar_part(source: str) -> Part:
    """A text under a grammar in Lark's notation, or in GBNF's (`root ::= ...`)."""
    return {"source": source}


def alone(part: Part) -> str:
    """The grammar of a text that is one part."""
    return json.dumps({"grammars": [part]})


def whole(answer: Part | None, tools: Sequence[Tool], calls: CallFormat, *, several: bool, begin: Begin) -> str:
    """The grammar of a text that is `answer`, or calls of `tools`, where both are given either; after reasoning, if it
    begins where there may be some. several: there may be more than one call.
    """
    if answer is not None and not tools and begin == "closed":
        return alone(answer)
    parts: list[Part] = []
    rules: list[str] = []
    choices: list[str] = []
    if answer is not None:
        choices.append("@answer")
        parts.append({"name": "answer", **answer})
    if tools:
        choices.append(f"call ({_quoted(calls.separator)} call)*" if several else "call")
        heads = [f"{_quoted(json.dumps(tool.name) + calls.middle)} @tool{n}" for n, tool in enumerate(tools)]
        rules.append(f"call: {_quoted(calls.begin)} ({' | '.join(heads)}) {_quoted(calls.end)}")
        parts += [{"name": f"tool{n}", **json_part(tool.parameters)} for n, tool in enumerate(tools)]
    start = f"({' | '.join(choices)})"
    if begin != "closed":
        rules.append(f"thought[suffix={_quoted(reasoning.CLOSE)}]: /(?s:.*)/")
        rules.append("blank: /[ \\n]{0,4}/")
        thought = "thought blank" if begin == "open" else f"({_quoted(reasoning.OPEN)} thought blank)?"
        start = f"{thought} {start}"
    return json.dumps({"grammars": [{"lark_grammar": "\n".join([f"start: {start}", *rules])}, *parts]})


def canonical(grammar: str) -> str:
    """The grammar with all of its parts as the engine takes them. It may take long, and raises what it likes for a
    source that is in neither notation."""
    parts = json.loads(grammar)["grammars"]
    for part in parts:
        if "source" in part:
            part["lark_grammar"] = any_to_lark(part.pop("source"))
    return json.dumps({"grammars": parts})


def _quoted(text: str) -> str:
    """A text as Lark writes it, which is as JSON does."""
    return json.dumps(text, ensure_ascii=False)
