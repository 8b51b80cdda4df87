"""Generated ids to text as they come, up to a stop string.

Owns: the text state of one choice: the cut character, the text held back, the stop strings.
Does not know: how pieces are delivered, reasoning or tool calls (they parse this text), the engine.

However the ids are split into pushes, the pushed texts and finish() join to the same text. Without stop strings it is
what `Tokenizer.decode` makes of prompt and generated ids together, less the whole characters of the prompt. A character
that the end of generation cuts is one U+FFFD, streamed or not.
"""

import codecs
from collections.abc import Sequence

import msgspec

from minserve.text.partial import partial_match
from minserve.text.tokenizer import Tokenizer

_MAX_CUT_BYTES = 3
"""A UTF-8 character has at most four bytes: a cut one, at most three."""


class TextDelta(msgspec.Struct, frozen=True):
    """What one push made.

    text: safe to send now. num_tokens: how many of all tokens pushed so far count; it stops at the token whose text
    completed a stop string. stop: that stop string. offsets: for each token of this push that counts, how many
    characters of generated text came before it (before any cut by a stop string).
    """

    text: str
    num_tokens: int
    stop: str | None
    offsets: list[int]


class Detokenizer:
    """Streams one choice's text.

    prompt_token_ids: what the text continues: a character that the prompt cut is completed, and the leading space of a
        SentencePiece word is dropped only at the start of a whole text. The prompt's own text is never emitted.
    stop: stop strings, none of them empty. They match in the text, wherever tokens begin or end. Of the matches that
        one token completes the leftmost counts, then the shortest. What may still become one is held back.
    include_stop_str_in_output: the text ends after the stop string rather than before it.
    keep_special_ids: special tokens that are text all the same, for a parser further on.
    min_tokens: a stop string completed by one of the first so many tokens is text like any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        keep_special_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        assert all(stop), "empty stop strings are refused with the request"
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_token_ids - keep_special_ids if skip_special_tokens else frozenset[int]()
        self._stop_strings = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._prompt_tail(prompt_token_ids)
        self._utf8.decode(tail)
        self._spaces_to_strip = 0 if tail else tokenizer.strip_left
        self._held = ""
        self._num_chars = 0
        self._num_tokens = 0
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Take the next tokens; after a stop string they are ignored.

        ends_with_stop_token: the last of them ended the text by its id; it counts, and it is text only if stop strings
        are to be included.
        """
        offsets: list[int] = []
        silent = len(token_ids) - 1 if ends_with_stop_token and not self._include_stop else -1
        for index, token_id in enumerate(token_ids):
            if self._stop is not None:
                break
            self._num_tokens += 1
            offsets.append(self._num_chars)
            if index != silent:
                self._append(self._next_text(token_id))
        if self._stop is None:
            keep = max((partial_match(self._held, stop) for stop in self._stop_strings), default=0)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        else:
            text, self._held = self._held, ""
        return TextDelta(text=text, num_tokens=self._num_tokens, stop=self._stop, offsets=offsets)

    def finish(self) -> str:
        """No more tokens: the text held back, and U+FFFD for a character that was cut. Nothing after a stop string.

        That last character may complete one, which `stop` then is.
        """
        if self._stop is None:
            self._append(self._strip(self._utf8.decode(b"", final=True)))
        text, self._held = self._held, ""
        return text

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one has."""
        return self._stop

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt's text, enough for any cut character; few ids make them."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped_ids:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _MAX_CUT_BYTES:
                break
        return tail

    def _next_text(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._skipped_ids:
            return ""
        return self._strip(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def _strip(self, text: str) -> str:
        while self._spaces_to_strip and text:
            stripped = text.removeprefix(" ")
            self._spaces_to_strip = self._spaces_to_strip - 1 if stripped != text else 0
            text = stripped
        return text

    def _append(self, text: str) -> None:
        """Add one token's text, and end at the first stop string that it completes."""
        if not text:
            return
        num_old = len(self._held)
        self._held += text
        self._num_chars += len(text)
        if self._num_tokens <= self._min_tokens:
            return
        # What was sent cannot begin a match: the beginning of one is held back.
        found = [
            (start, len(stop), stop)
            for stop in self._stop_strings
            if (start := self._held.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if found:
            start, length, self._stop = min(found)
            self._held = self._held[: start + length if self._include_stop else start]
