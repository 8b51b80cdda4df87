"""One tool call in JSON, as it comes: `{"name": "add", "arguments": {"a": 1}}`.

Owns: what the beginning of a call looks like, and where its arguments and the whole object end.
Does not know: what stands around a call in a text (toolcalls), which fields other formats have.

The name and the opening brace of the arguments decide. Until then everything is held, and may turn out to be no call;
from there on the arguments are passed on as the model writes them, valid or not: a stream cannot take back what it has
sent. Arguments end where their braces do, at a tag, or where the text ends.
"""

import re
from collections.abc import Set
from typing import Literal

import msgspec

MAX_HEAD_CHARS = 1024
"""A beginning that is longer is no call: it is read anew with every token."""

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_OTHER_FIELDS = ("type", "id")

_TOKEN = re.compile(r'\s*([{}:,]|"[^"\\\x00-\x1f]*")')
_MAY_BECOME_TOKEN = re.compile(r'\s*("[^"\\\x00-\x1f]*)?')
_MARK = re.compile(r'["\\{}\[\]<]')


class CallStart(msgspec.Struct, frozen=True):
    """A call begins."""

    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the call that began last: JSON, as the model wrote it."""

    text: str


CallEvent = CallStart | CallArguments

State = Literal["head", "late", "arguments", "behind", "rest", "done", "none"]


class CallReader:
    """Reads one call.

    names: the only names that a call may have; None: any.
    state: "head" (nothing is decided), "late" (arguments came before the name, so that the whole object is awaited),
        "arguments", "behind" (what comes next decides whether the object goes on), "rest" (of the object, which is
        dropped), "done", "none" (this is no call).
    left: the text that is not the call's: what follows a call that is done; all of it if this is none.
    """

    def __init__(self, names: Set[str] | None = None) -> None:
        self.state: State = "head"
        self.left = ""
        self._names = names
        self._held = ""
        self._braces = _Braces(depth=0)

    def push(self, text: str) -> list[CallEvent]:
        """Take the next text, while the state is neither "done" nor "none"."""
        events: list[CallEvent] = []
        if self.state == "head":
            self._held, text = self._held + text, ""
            text = self._read_head(events)
        if self.state == "late":
            self._read_late(text, events)
            return events
        if self.state == "arguments":
            length = self._braces.feed(text, until_depth=1)
            if length:
                events.append(CallArguments(text[:length]))
            text = text[length:]
            if self._braces.broken or self._braces.depth == 1:
                self.state = "behind"
        if self.state == "behind":
            self._held += text
            if rest := self._held.lstrip():
                self.state = "rest" if rest[0] == "," else "done"
                self.left = rest[1:] if rest[0] == "}" else self._held
        if self.state == "rest":
            text = text[self._braces.feed(text, until_depth=0) :]
            if self._braces.broken or self._braces.depth == 0:
                self.state, self.left = "done", text
        return events

    def finish(self) -> None:
        """No more text."""
        if self.state in ("head", "late"):
            self._give_up()

    def _read_head(self, events: list[CallEvent]) -> str:
        """Decide, if enough is there; what is to be read on, from the opening brace of the arguments or of the call."""
        head = _Head(self._held)
        try:
            name = head.read()
        except _IncompleteError:
            if len(self._held) > MAX_HEAD_CHARS:
                self._give_up()
            return ""
        except _NoCallError:
            self._give_up()
            return ""
        if name is not None and not self._is_allowed(name):
            self._give_up()
            return ""
        text, self._held = self._held, ""
        if name is None:
            self.state = "late"
            return text
        text = text[head.position :]
        events.append(CallStart(name))
        if head.has_arguments:
            self.state, self._braces = "arguments", _Braces(depth=1)
            return text
        events.append(CallArguments("{}"))
        self.state, self.left = "done", text
        return ""

    def _read_late(self, text: str, events: list[CallEvent]) -> None:
        self._held += text
        length = self._braces.feed(text, until_depth=0)
        if self._braces.broken:
            self._give_up()
        elif self._braces.depth == 0:
            end = len(self._held) - len(text) + length
            call = _parse(self._held[:end])
            if call is None or not self._is_allowed(call[0].name):
                self._give_up()
            else:
                events += call
                self.state, self.left, self._held = "done", self._held[end:], ""

    def _is_allowed(self, name: str) -> bool:
        return bool(name) and (self._names is None or name in self._names)

    def _give_up(self) -> None:
        self.state, self.left, self._held = "none", self._held, ""


class _IncompleteError(Exception):
    """More text is needed to tell."""


class _NoCallError(Exception):
    """However the text goes on, it is no call."""


class _Head:
    """A call up to its arguments. Read from the beginning each time that there is more of it, since it is short."""

    def __init__(self, text: str) -> None:
        self.position = 0
        self.has_arguments = False
        self._text = text

    def read(self) -> str | None:
        """The call's name, None if it comes after the arguments. position: the end, or where the arguments begin."""
        name = None
        self._take("{")
        while True:
            key = self._take('"')[1:-1]
            if key not in (_NAME, *_ARGUMENTS, *_OTHER_FIELDS):
                raise _NoCallError
            self._take(":")
            if key in _ARGUMENTS:
                self._take("{")
                self.position -= 1
                self.has_arguments = True
                return name
            value = self._take('"')[1:-1]
            if key == _NAME:
                name = value
            if self._take(",}") == "}":
                if name is None:
                    raise _NoCallError
                return name

    def _take(self, first: str) -> str:
        """The next token, which must begin with one of these characters."""
        match = _TOKEN.match(self._text, self.position)
        if match is None:
            may_become = _MAY_BECOME_TOKEN.fullmatch(self._text, self.position)
            raise _IncompleteError if may_become else _NoCallError
        if match[1][0] not in first:
            raise _NoCallError
        self.position = match.end()
        return match[1]


class _Braces:
    """How deep a JSON text is, by its brackets outside of strings. broken: a tag came where JSON can have none."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.broken = False
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, *, until_depth: int) -> int:
        """How many characters come before a tag, or up to the bracket that brings the depth down to until_depth."""
        if self.broken:
            return 0
        position = 0
        if self._escaped and text:
            position, self._escaped = 1, False
        while mark := _MARK.search(text, position):
            position = mark.end()
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if mark[0] == "\\":
                    self._escaped = position == len(text)
                    position += 1
            elif mark[0] == "<":
                self.broken = True
                return position - 1
            elif mark[0] in "{[":
                self.depth += 1
            elif mark[0] in "}]":
                self.depth -= 1
                if self.depth <= until_depth:
                    return position
        return len(text)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def _parse(text: str) -> tuple[CallStart, CallArguments] | None:
    """A whole call."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = (bytes(call.arguments) or bytes(call.parameters)).decode().strip()
    return (CallStart(call.name), CallArguments(arguments)) if arguments.startswith("{") else None
