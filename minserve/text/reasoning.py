"""Reasoning in generated text, as it comes: what stands between `<think>` and `</think>` before the answer.

Owns: the tags, where reasoning begins and ends, and for which templates that is known.
Does not know: tool calls (they are looked for in the answer only), tokens, HTTP.

Who opens the reasoning differs: the model itself (Qwen3), the template's last words (Qwen3-Thinking, DeepSeek-R1), the
message that is continued, or nobody (an early DeepSeek-R1, which only closes it). So a parser is made for one prompt.
Line breaks between a tag and a text belong to the tag, as in the templates: what a client sends back gives the same
prompt. A tag inside the answer is text like any other.
"""

from typing import Literal

import msgspec

from minserve.errors import ConfigError
from minserve.text.partial import partial_match

OPEN = "<think>"
CLOSE = "</think>"
MARKERS = (OPEN, CLOSE)


class Reasoning(msgspec.Struct, frozen=True):
    """Text that is no part of the answer."""

    text: str


ReasoningEvent = str | Reasoning

Begin = Literal["open", "closed", "tag"]
"""Where a generated text begins: inside reasoning; after it; or where a tag may open it."""


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model marks its reasoning. always: it reasons even where nothing has opened it."""

    name: str
    always: bool = False

    def parser_after(self, prompt: str, continued: str = "") -> "ReasoningParser":
        """The parser of what comes after a prompt. continued: the text of the message that the answer goes on with."""
        return ReasoningParser(self.begin_after(prompt, continued))

    def begin_after(self, prompt: str, continued: str = "") -> Begin:
        """Where a text begins that comes after a prompt; as for `parser_after`."""
        # Only what the template wrote last counts: users may write tags too.
        end = prompt.rstrip()
        if continued.strip():
            return "open" if continued.rfind(OPEN) > continued.rfind(CLOSE) else "closed"
        if end.endswith(OPEN):
            return "open"
        if end.endswith(CLOSE):
            return "closed"
        return "open" if self.always else "tag"


_FORMATS = {
    "qwen3": ReasoningFormat("qwen3"),
    "qwen3-thinking": ReasoningFormat("qwen3"),
    "deepseek_r1": ReasoningFormat("deepseek_r1", always=True),
    "deepseek-r1": ReasoningFormat("deepseek_r1", always=True),
}
"""By the names that users of other servers know."""


def reasoning_format(name: str, *, template_closes_tag: bool) -> ReasoningFormat | None:
    """The format of that name; None for "none". Raises ConfigError, with the names there are.

    "auto": Qwen3's, if the template knows the closing tag. That is safe: it takes nothing for reasoning that has not
    been opened in so many letters, by the template's last words or by the first of the answer.
    """
    if name == "auto":
        return _FORMATS["qwen3"] if template_closes_tag else None
    if name == "none":
        return None
    if name not in _FORMATS:
        raise ConfigError(
            f"there is no reasoning parser {name!r}; there are {', '.join(['auto', 'none', *sorted(_FORMATS)])}"
        )
    return _FORMATS[name]


class ReasoningParser:
    """Splits one text. is_open: it is inside reasoning. end: how many of its characters came before the answer."""

    def __init__(self, begin: Begin) -> None:
        self.is_open = begin == "open"
        self.end: int | None = 0 if begin == "closed" else None
        self._at_begin = begin != "closed"
        self._strips = False  # Line breaks after a tag
        self._buffer = ""
        self._num_chars = 0

    def push(self, text: str) -> list[ReasoningEvent]:
        """Take the next text. Held back: what may become a tag, and line breaks that may stand at one."""
        self._buffer += text
        self._num_chars += len(text)
        if self._at_begin and not self._read_begin():
            return []
        events: list[ReasoningEvent] = []
        if self.is_open:
            self._read_reasoning(events)
        if not self.is_open and (answer := self._take(len(self._buffer))):
            events.append(answer)
        return events

    def finish(self) -> list[ReasoningEvent]:
        """No more text: what was held back is what it looks like."""
        text = self._take(len(self._buffer))
        if not text:
            return []
        return [Reasoning(text) if self.is_open else text]

    def _read_begin(self) -> bool:
        """Look for an opening tag before anything else. False if more text is needed to tell."""
        begun = self._buffer.lstrip()
        if begun != OPEN and OPEN.startswith(begun):
            return False
        if begun.startswith(OPEN):  # Perhaps a second time, after the template's.
            self._buffer = begun.removeprefix(OPEN)
            self.is_open = True
        elif not self.is_open:
            self.end = 0
        self._at_begin, self._strips = False, self.is_open
        return True

    def _read_reasoning(self, events: list[ReasoningEvent]) -> None:
        end = self._buffer.find(CLOSE)
        length = end if end >= 0 else len(self._buffer) - partial_match(self._buffer, CLOSE)
        held = self._buffer[length:]
        text = self._take(len(self._buffer[:length].rstrip("\n")))
        if text:
            events.append(Reasoning(text))
        if end >= 0:
            self._buffer = held.removeprefix(CLOSE)
            self.is_open, self._strips = False, True
            self.end = self._num_chars - len(self._buffer)

    def _take(self, length: int) -> str:
        """The first characters of the buffer, less line breaks that belong to the tag before them."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._strips:
            text = text.lstrip("\n")
            self._strips = not text
        return text
