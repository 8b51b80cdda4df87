"""Texts to read: long real ones, and what is hidden in them or asked about them.

Owns: which documents, and the wording of needles and questions. Does not know: engines or policies.

Documents come from Debian's packages; the quick ones from Python's own manual, which every Python brings along.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from minserve.text.chat import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from tools.draft_training.sources import DOCUMENTS, fetch, read_file

PACKAGES = ("python3.11-doc", "jargon-text")
LONG_CHARS = 60_000
"""Documents are at least so long: 8K tokens and more, of any text."""

CHARS_PER_TOKEN = 8
"""No text has more, so that one that is cut to so many characters has tokens enough."""

QUESTIONS = (
    "Explain what the text above is about to somebody who has not read it.",
    "What are the most important points of this text? Answer in a list.",
)
CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Dublin", "Quito", "Riga", "Accra", "Hanoi")
NEEDLE = "\nThe magic number of {city} is {number}.\n"
NEEDLE_QUESTION = "\n\nWhat is the magic number of {city}?"
NEEDLE_ANSWER = "The magic number of {city} is"
COPY_QUESTION = "\n\nRepeat the passage of this text that begins with: {begin}"
BEGIN_TOKENS = 12
"""Of a passage that is to be copied, which are given."""


class Task(NamedTuple):
    """Something to read, a question about it, and what the answer should be. context, question: tokens; the question is
    fed after the context, and ends with the answer's first words. depth: where the answer stands, 0 to 1."""

    context: list[int]
    question: list[int]
    answer: list[int]
    depth: float


class Texts:
    """Documents as tokens. folder: of unpacked packages; None: the quick ones."""

    def __init__(self, model_folder: Path, folder: Path | None) -> None:
        self._tokenizer = Tokenizer.from_folder(model_folder)
        template = ChatTemplate.from_folder(model_folder)
        before, _, after = template.render([{"role": "user", "content": "<text>"}]).partition("<text>")
        self._before, self._after = self.tokens(before), after
        self._texts = _quick_texts() if folder is None else _package_texts(folder)

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def document(self, number: int, num_tokens: int) -> list[int]:
        """The beginning of a document; the same number is the same document."""
        text = self._texts[number % len(self._texts)]
        ids = self.tokens(text[: CHARS_PER_TOKEN * num_tokens])
        assert len(ids) >= num_tokens, (number, len(ids), num_tokens)
        return ids[:num_tokens]

    def asked(self, number: int, num_tokens: int) -> list[int]:
        """A chat of so many tokens: a document and a question about it, up to where the answer begins."""
        question = self._question(QUESTIONS[number % len(QUESTIONS)], "")
        own = self.document(number, num_tokens - len(self._before) - len(question))
        return [*self._before, *own, *question]

    def needle(self, number: int, num_tokens: int, depth: float) -> Task:
        """A number of five digits, hidden in a document of so many tokens."""
        rng = random.Random(number)
        city, secret = CITIES[number % len(CITIES)], str(rng.randint(10000, 99999))
        hidden = self.tokens(NEEDLE.format(city=city, number=secret))
        filler = self.document(number, num_tokens - len(self._before) - len(hidden))
        at = self._line_end(filler, depth)
        context = [*self._before, *filler[:at], *hidden, *filler[at:]]
        question = self._question(NEEDLE_QUESTION.format(city=city), NEEDLE_ANSWER.format(city=city))
        return Task(context, question, self.tokens(" " + secret), depth)

    def copy(self, number: int, num_tokens: int, depth: float, length: int) -> Task:
        """A passage of a document of so many tokens, which is to be repeated."""
        own = self.document(number, num_tokens - len(self._before))
        at = self._paragraph(own, depth)
        begin, passage = own[at : at + BEGIN_TOKENS], own[at + BEGIN_TOKENS : at + BEGIN_TOKENS + length]
        assert len(passage) == length, (depth, num_tokens)
        shown = self._tokenizer.decode(begin).strip()
        question = [*self._question(COPY_QUESTION.format(begin=shown), ""), *begin]
        return Task([*self._before, *own], question, passage, depth)

    def is_answered(self, task: Task, answer: Sequence[int]) -> bool:
        """Whether the answer begins with what is wanted."""
        wanted, said = (self._tokenizer.decode(ids).strip() for ids in (task.answer, answer))
        return said.startswith(wanted)

    def _question(self, question: str, answer: str) -> list[int]:
        return self.tokens(question + self._after + answer)

    def _paragraph(self, ids: Sequence[int], depth: float) -> int:
        """Where the first paragraph of prose begins behind so much of the text."""
        first = max(int(depth * len(ids)), 2)
        begins = (
            at
            for at in range(first, len(ids))
            if self._tokenizer.decode(ids[at - 2 : at]).endswith("\n\n")
            and self._tokenizer.decode(ids[at : at + 1])[:1].isalpha()
        )
        return next(begins, first)

    def _line_end(self, ids: Sequence[int], depth: float) -> int:
        """The first end of a line behind so much of the text."""
        first = int(depth * len(ids))
        ends = (at + 1 for at in range(first, len(ids)) if "\n" in self._tokenizer.decode(ids[at : at + 1]))
        return next(ends, first)


def _quick_texts() -> list[str]:
    return ["\n".join(topics[name] for name in ("specialnames", "compound", "types", "formatstrings", "typesseq"))]


def _package_texts(folder: Path) -> list[str]:
    """The packages' files by turns, the longest first; one that is very long is cut into several."""
    if not all((folder / package).is_dir() for package in PACKAGES):
        fetch(folder, PACKAGES)
    kinds = []
    for package in PACKAGES:
        texts = [read_file(path) for path in sorted((folder / package).glob(DOCUMENTS[package]))]
        parts = [text[at : at + LONG_CHARS] for text in texts for at in range(0, len(text), LONG_CHARS)]
        kinds.append([part for part in parts if len(part) == LONG_CHARS])
    assert all(kinds), f"{folder} does not hold what these packages should: {PACKAGES}"
    return [text for own in zip(*kinds) for text in own]
