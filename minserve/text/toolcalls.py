"""Tool calls in generated text, as they come.

Owns: the formats in which models write calls, and the parser of each, by name.
Does not know: which tools the request offered, call ids, HTTP.

A parser loses nothing: what turns out not to be a call is delivered as the text that it is. It reads the detokenizer's
text, in which its markers must be present even where they are special tokens: give the detokenizer
`tokenizer.ids_of(special_markers)` as keep_special_ids.
"""

import json
import re

import msgspec

from minserve.errors import ConfigError
from minserve.text.partial import partial_match

_NO_OBJECT = re.compile(r"\s*[^\s{]")


class ToolCall(msgspec.Struct, frozen=True):
    """A complete call. arguments: a JSON object, as the model wrote it."""

    name: str
    arguments: str


ToolEvent = str | ToolCall
"""Prose, or a call."""


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them in prose: Hermes, Qwen2.5, Qwen3.

    White space that only sets calls apart, or stands before the first or after the last, is dropped with them.
    """

    special_markers = ("<tool_call>", "</tool_call>")

    def __init__(self) -> None:
        self._open, self._close = self.special_markers
        self._buffer = ""
        self._in_call = False
        self._search_from = 0  # Where in the buffer the closing tag may begin
        self._blank: str | None = ""  # White space that is prose if more prose follows; None within prose
        self._num_calls = 0

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next text. Held back: a call until it is complete, and what may become its opening tag."""
        self._buffer += text
        events: list[ToolEvent] = []
        while self._read_call(events) if self._in_call else self._read_prose(events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        """No more text: a call that lacks nothing but its closing tag counts, anything else held back is text."""
        events: list[ToolEvent] = []
        while self._in_call:
            if call := _parse_call(self._buffer):
                self._take_call(call, len(self._buffer), events)
            else:
                self._give_up_call(events)
                events += self.push("")
        self._prose(self._buffer, events)
        if self._blank and not self._num_calls:
            events.append(self._blank)
        self._buffer, self._blank = "", None
        return events

    def _read_prose(self, events: list[ToolEvent]) -> bool:
        """Deliver prose up to an opening tag. False if more text is needed to go on."""
        start = self._buffer.find(self._open)
        if start < 0:
            keep = partial_match(self._buffer, self._open)
            self._prose(self._buffer[: len(self._buffer) - keep], events)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._prose(self._buffer[:start], events)
        self._buffer = self._buffer[start + len(self._open) :]
        self._in_call, self._search_from = True, 0
        return True

    def _read_call(self, events: list[ToolEvent]) -> bool:
        """Deliver a call that is complete. False if more text is needed to go on."""
        if _NO_OBJECT.match(self._buffer):
            self._give_up_call(events)
            return True
        end = self._buffer.find(self._close, self._search_from)
        if end < 0:
            self._search_from = max(self._search_from, len(self._buffer) - len(self._close) + 1)
            return False
        after = end + len(self._close)
        if call := _parse_call(self._buffer[:end]):
            self._take_call(call, after, events)
        elif _ends_inside_string(self._buffer[:end]) and self._open not in self._buffer[:end]:
            self._search_from = after  # This tag stands in an argument: await the next.
        else:
            self._give_up_call(events)
        return True

    def _take_call(self, call: ToolCall, length: int, events: list[ToolEvent]) -> None:
        events.append(call)
        self._num_calls += 1
        self._buffer = self._buffer[length:]
        self._in_call, self._blank = False, ""

    def _give_up_call(self, events: list[ToolEvent]) -> None:
        """The opening tag opened no call: it is prose, and what follows is read anew."""
        self._in_call = False
        self._prose(self._open, events)

    def _prose(self, text: str, events: list[ToolEvent]) -> None:
        if self._blank is not None:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank = None
        if text:
            events.append(text)


class _HermesCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _parse_call(text: str) -> ToolCall | None:
    try:
        call = msgspec.json.decode(text, type=_HermesCall)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = bytes(call.arguments).decode().strip()
    if not call.name or not arguments.startswith("{"):
        return None
    return ToolCall(name=call.name, arguments=arguments)


def _ends_inside_string(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


_PARSERS = {"hermes": HermesParser, "qwen25": HermesParser, "qwen3": HermesParser}
"""By the names that users of other servers know. (Qwen3-Coder writes XML, which is another format.)"""


def tool_parser_class(name: str) -> type[HermesParser]:
    """The parser of that name. Raises ConfigError, with the names there are."""
    if name not in _PARSERS:
        raise ConfigError(f"there is no tool call parser {name!r}; there are {', '.join(sorted(_PARSERS))}")
    return _PARSERS[name]
