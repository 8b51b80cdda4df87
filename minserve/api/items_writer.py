"""What a model says as the items of /v1/responses, and the events that tell of them.

Owns: which items a text becomes, and the order of their events. Does not know: the response around them.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from minserve.api.chat_answer import new_call_id
from minserve.api.items_shapes import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputPart,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    TextDelta,
    TextDone,
)
from minserve.text.answer import AnswerEvent
from minserve.text.jsoncall import CallArguments, CallStart
from minserve.text.reasoning import Reasoning


class ItemWriter:
    """The items of one response. done: those that have ended."""

    def __init__(self) -> None:
        self.done: list[OutputItem] = []
        self._open: _OpenItem | None = None

    @property
    def in_call(self) -> bool:
        """Whether the last item is a call, and has not been ended."""
        return isinstance(self._open, _OpenCall)

    def write(self, said: AnswerEvent) -> list[Event]:
        """The events of what the model says next. Text goes on in the item of its kind; each call is an item."""
        match said:
            case CallStart(name):
                return self._begin(_OpenCall(self._next_index, name))
            case CallArguments(text):
                assert self._open is not None, "arguments come after the start of their call"
                return [self._open.add(text)]
            case Reasoning(text):
                return self._write_text(_REASONING, text)
            case text:
                return self._write_text(_MESSAGE, text)

    def finish(self, status: ItemStatus) -> list[Event]:
        """The model says no more. status: of the last item; there is always one."""
        events = [] if self.done or self._open else self._begin(_OpenText(0, _MESSAGE))
        return events + self._end(status)

    def unfinished(self) -> list[OutputItem]:
        """What there is of the item that has not ended."""
        return [] if self._open is None else [self._open.item("incomplete")]

    def _write_text(self, kind: "_TextKind", text: str) -> list[Event]:
        events: list[Event] = []
        if not (isinstance(self._open, _OpenText) and self._open.kind is kind):
            events = self._begin(_OpenText(self._next_index, kind))
        assert self._open is not None
        return [*events, self._open.add(text)]

    @property
    def _next_index(self) -> int:
        return len(self.done) + (self._open is not None)

    def _begin(self, item: "_OpenItem") -> list[Event]:
        events = self._end("completed")
        self._open = item
        return events + item.begin()

    def _end(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.done.append(self._open.item(status))
        self._open = None
        return events


class _OpenItem(ABC):
    """An item in the making, at a place in the output."""

    def __init__(self, index: int, prefix: str) -> None:
        self._id = f"{prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._texts: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """All of it so far."""

    @abstractmethod
    def add(self, text: str) -> Event:
        """The event of more text, which is kept."""

    def begin(self) -> list[Event]:
        """The first events."""
        return [ItemAdded(self._index, self.item("in_progress"))]

    def end(self, status: ItemStatus) -> list[Event]:
        """The last events."""
        return [ItemDone(self._index, self.item(status))]


class _TextKind(NamedTuple):
    """What a kind of text is sent as."""

    prefix: str
    item: Callable[[str, ItemStatus, list[Any]], OutputItem]
    part: Callable[[str], OutputPart]
    delta: Callable[[str, int, str], Event]
    done: Callable[[str, int, str], Event]


_MESSAGE = _TextKind("msg", OutputMessage, OutputText, TextDelta, TextDone)
_REASONING = _TextKind("rs", OutputReasoning, ReasoningText, ReasoningDelta, ReasoningDone)


class _OpenText(_OpenItem):
    """An item with one part, which is text."""

    def __init__(self, index: int, kind: _TextKind) -> None:
        super().__init__(index, kind.prefix)
        self.kind = kind

    def item(self, status: ItemStatus) -> OutputItem:
        return self.kind.item(self._id, status, [] if status == "in_progress" else [self.kind.part(self._text)])

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return self.kind.delta(self._id, self._index, text)

    def begin(self) -> list[Event]:
        return [*super().begin(), PartAdded(self._id, self._index, self.kind.part(""))]

    def end(self, status: ItemStatus) -> list[Event]:
        text = self._text
        part = PartDone(self._id, self._index, self.kind.part(text))
        return [self.kind.done(self._id, self._index, text), part, *super().end(status)]


class _OpenCall(_OpenItem):
    """A call."""

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index, "fc")
        self._call_id = new_call_id()
        self._name = name

    def item(self, status: ItemStatus) -> OutputItem:
        return OutputCall(self._id, status, self._call_id, self._name, self._text)

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return ArgumentsDelta(self._id, self._index, text)

    def end(self, status: ItemStatus) -> list[Event]:
        return [ArgumentsDone(self._id, self._index, self._name, self._text), *super().end(status)]
