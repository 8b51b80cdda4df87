"""The parts of a chat answer, as they come: reasoning, prose, tool calls.

Owns: the order in which the text is taken apart, and what is counted on the way.
Does not know: the formats (reasoning, toolcalls), which shapes clients are sent.
"""

from bisect import bisect_left
from typing import Literal

from minserve.text.output import Piece
from minserve.text.reasoning import Reasoning, ReasoningEvent, ReasoningParser
from minserve.text.toolcalls import ToolEvent, ToolParser

AnswerEvent = Reasoning | ToolEvent


class AnswerParser:
    """Takes one text apart. A parser that is None leaves its part in the prose.

    What is taken apart does not depend on how the text was cut into pieces, so whole and streamed answers agree.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._offsets: list[int] = []  # Of the tokens up to the end of reasoning, and a few more

    def push(self, piece: Piece) -> list[AnswerEvent]:
        """What the piece adds, in order."""
        if self._reasoning is not None and self._reasoning.end is None:
            self._offsets += piece.text_offsets
        ends = piece.finish_reason is not None
        parts: list[ReasoningEvent] = [piece.text]
        if self._reasoning is not None:
            parts = self._reasoning.push(piece.text) + (self._reasoning.finish() if ends else [])
        if self._tools is None:
            return [part for part in parts if part]
        events: list[AnswerEvent] = []
        for part in parts:
            events += self._tools.push(part) if isinstance(part, str) else [part]
        return events + (self._tools.finish() if ends else [])

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that came before the answer, tags included."""
        if self._reasoning is None:
            return 0
        if self._reasoning.end is None:
            return len(self._offsets) if self._reasoning.is_open else 0
        return bisect_left(self._offsets, self._reasoning.end)

    @property
    def call_is_cut(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._tools is not None and self._tools.is_cut

    def finish_reason(self, piece: Piece) -> Literal["stop", "length", "tool_calls"] | None:
        """The piece's reason; for a text that ended with all of its calls complete it is the calls."""
        called = self._tools is not None and self._tools.num_calls > 0 and not self.call_is_cut
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason
