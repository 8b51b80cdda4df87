"""Tool calls in generated text, as they come.

Owns: the formats in which models write calls, and the parser of each, by name.
Does not know: what a call is made of (jsoncall), reasoning, call ids, HTTP.

A parser loses nothing: what turns out not to be a call is delivered as the text that it is. It reads the detokenizer's
text, in which its markers must be present even where they are special tokens: give the detokenizer
`tokenizer.ids_of(special_markers)` as keep_special_ids.
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import ClassVar, Literal

import msgspec

from minserve.errors import ConfigError
from minserve.text.jsoncall import CallEvent, CallReader, CallStart
from minserve.text.partial import partial_match

ToolEvent = str | CallEvent
"""Prose, or a part of a call."""

_SEPARATORS = " \t\r\n;,"


class CallFormat(msgspec.Struct, frozen=True):
    """How calls are written: before the name, between it and the arguments, behind them, and between two calls."""

    begin: str
    middle: str
    end: str
    separator: str


class ToolParser(ABC):
    """What the formats share. tool_names: the tools that the request offered. call_format: what a model is made to
    write that has no choice.

    White space that only sets calls apart, or stands before the first or after the last, is dropped with them.
    """

    special_markers: ClassVar[tuple[str, ...]]
    call_format: ClassVar[CallFormat]

    def __init__(self, tool_names: Set[str]) -> None:
        self.num_calls = 0
        self._tool_names = tool_names
        self._state: Literal["prose", "call", "edge"] = "prose"
        self._buffer = ""
        self._lead = ""  # What stood before the JSON of the call that is being read
        self._reader = CallReader()
        self._blank: str | None = ""  # White space that is prose if more prose follows; None within prose

    @property
    def is_cut(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._state == "call" and self._reader.state == "arguments"

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next text. Held back: what may become a call or a marker."""
        self._buffer += text
        events: list[ToolEvent] = []
        steps = {"prose": self._read_prose, "call": self._read_call, "edge": self._read_edge}
        while steps[self._state](events):
            pass
        return events

    def finish(self) -> list[ToolEvent]:
        """No more text: a call whose arguments have begun counts, anything else held back is text."""
        events: list[ToolEvent] = []
        while self._state == "call":
            self._reader.finish()
            if self._reader.state != "none":
                return events
            self._give_up_call(events)
            events += self.push("")
        # At the edge of a call, what is held is a separator or a part of a marker: neither is prose.
        if self._state == "prose" or not self.num_calls:
            self._prose(self._buffer, events)
            if self._blank and not self.num_calls:
                events.append(self._blank)
        return events

    @abstractmethod
    def _read_edge(self, events: list[ToolEvent]) -> bool:
        """What may stand behind a call. As all steps: whether to go on at once; else more text is needed."""

    def _read_prose(self, events: list[ToolEvent]) -> bool:
        """Deliver prose up to the marker that opens a call."""
        marker = self.special_markers[0]
        start = self._buffer.find(marker)
        if start < 0:
            keep = partial_match(self._buffer, marker)
            self._prose(self._buffer[: len(self._buffer) - keep], events)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._prose(self._buffer[:start], events)
        self._open_call(marker, self._buffer[start + len(marker) :])
        return True

    def _open_call(self, lead: str, rest: str) -> None:
        self._lead, self._buffer = lead, rest
        self._state, self._reader = "call", self._new_reader()

    def _new_reader(self) -> CallReader:
        return CallReader()

    def _read_call(self, events: list[ToolEvent]) -> bool:
        """Deliver what there is of a call."""
        text, self._buffer = self._buffer, ""
        new = self._reader.push(text)
        events += new
        self.num_calls += sum(isinstance(event, CallStart) for event in new)
        if self._reader.state == "none":
            self._give_up_call(events)
            return True
        if self._reader.state != "done":
            return False
        self._buffer = self._reader.left
        self._state, self._blank = "edge", ""
        return True

    def _give_up_call(self, events: list[ToolEvent]) -> None:
        """What opened the call is prose, and what follows is read anew."""
        self._buffer, self._state = self._reader.left, "prose"
        self._prose(self._lead, events)

    def _prose(self, text: str, events: list[ToolEvent]) -> None:
        if self._blank is not None:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank = None
        if text:
            events.append(text)


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them in prose: Hermes, Qwen2.5, Qwen3.

    The tag says that it is a call, so that a tool which was not offered is called all the same. The closing tag may be
    missing.
    """

    special_markers = ("<tool_call>", "</tool_call>")
    call_format = CallFormat('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n")

    def _read_edge(self, events: list[ToolEvent]) -> bool:
        close = self.special_markers[1]
        rest = self._buffer.lstrip()
        if rest != close and close.startswith(rest):
            return False
        if rest.startswith(close):
            self._buffer = rest.removeprefix(close)
        self._state = "prose"
        return True


class LlamaParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` instead of prose: Llama 3. Several are set apart by `;`.

    `<|python_tag|>` may come before; with it, a call may also follow prose. Without it nothing but the name tells a
    call from an answer that is JSON, so it must be that of a tool that was offered.
    """

    special_markers = ("<|python_tag|>",)
    call_format = CallFormat('{"name": ', ', "parameters": ', "}", "; ")

    def __init__(self, tool_names: Set[str]) -> None:
        super().__init__(tool_names)
        self._state = "edge"

    def _new_reader(self) -> CallReader:
        return CallReader(self._tool_names)

    def _read_edge(self, events: list[ToolEvent]) -> bool:
        marker = self.special_markers[0]
        rest = self._buffer.lstrip(_SEPARATORS if self.num_calls else None)
        lead = self._buffer[: len(self._buffer) - len(rest)]
        if rest.startswith("{"):
            self._open_call(lead, rest)
        elif rest.startswith(marker):
            self._open_call(lead + marker, rest.removeprefix(marker))
        elif marker.startswith(rest):
            return False
        else:
            self._state = "prose"
        return True


_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen25": HermesParser,
    "qwen3": HermesParser,
    "llama3_json": LlamaParser,
    "llama3": LlamaParser,
}
"""By the names that users of other servers know. (Qwen3-Coder writes XML, which is another format.)"""


def tool_parser_class(name: str) -> type[ToolParser]:
    """The parser of that name. Raises ConfigError, with the names there are."""
    if name not in _PARSERS:
        raise ConfigError(f"there is no tool call parser {name!r}; there are {', '.join(sorted(_PARSERS))}")
    return _PARSERS[name]
