"""What the target says to the prompts, by the engine, as token ids on disk.

Owns: how prompts become token ids, conversations of several turns, and the file of answers. Does not know: training.

A line of the file is a whole text: what was asked and what was answered. Where the work ends too early, running it
again goes on behind the last whole line.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from minserve.llm import LLM
from minserve.protocol import SamplingParams, Submit

from .prompts import Prompt

TEMPERATURES = (0.0, 0.7)
"""By turns: drafts are wanted for greedy text and for sampled text, as users sample it."""

TOP_P = 0.95
MARGIN = 128
"""Tokens that a chat template and a question add to a document."""

MIN_ANSWER = 8


class Text(msgspec.Struct, array_like=True):
    """start: where the first answer begins in ids."""

    prompt: int
    kind: str
    held_out: bool
    start: int
    ids: list[int]


class Lengths(NamedTuple):
    """Tokens. chat, document: of an answer; longest: of a document with its answer."""

    chat: int
    document: int
    longest: int

    def answer(self, prompt: Prompt) -> int:
        return self.chat if prompt.kind == "chat" else self.document


class _Conversation:
    """One prompt on its way. ids: what the engine is asked to go on with, and then all of it."""

    def __init__(self, llm: LLM, number: int, prompt: Prompt, lengths: Lengths) -> None:
        self.number, self.prompt, self.answer = number, prompt, list[int]()
        self._llm, self._turn = llm, 0
        self._messages: list[dict[str, Any]] = []
        self._length = max(1, lengths.longest - lengths.document)
        self.ids = self._first_ids()
        self.start = len(self.ids)

    def _first_ids(self) -> list[int]:
        llm, prompt = self._llm, self.prompt
        if prompt.kind == "chat":
            return self._ask(prompt.turns[0])
        if not prompt.turns:
            return llm.tokenizer.encode(prompt.text, add_special_tokens=True)[: self._length]
        begin = llm.tokenizer.encode(prompt.text, add_special_tokens=False)[: max(1, self._length - MARGIN)]
        return self._ask(f"{llm.tokenizer.decode(begin)}\n\n{prompt.turns[0]}")[: self._length]

    def _ask(self, turn: str) -> list[int]:
        """The ids of the conversation with one more turn; for a model without a chat template, plain text."""
        tokenizer, template = self._llm.tokenizer, self._llm.chat_template
        if not template.sources:
            return tokenizer.encode(turn + "\n", add_special_tokens=True)
        self._messages.append({"role": "user", "content": turn})
        return tokenizer.encode(template.render(self._messages), add_special_tokens=False)

    def go_on(self, room: int) -> bool:
        """Take in the answer, and ask the next turn if there is one and room tokens hold it."""
        turns = self.prompt.turns
        self._turn += 1
        if self.prompt.kind == "document" or self._turn >= len(turns) or not self._llm.chat_template.sources:
            return False
        kept, answer = self.ids, self._llm.tokenizer.decode(self.answer)
        self._messages.append({"role": "assistant", "content": answer})
        ids = self._ask(turns[self._turn])
        if len(ids) > room:
            return False
        # Written out and read again, the first answer may have other ids; its text begins where it began.
        same = next((at for at, (a, b) in enumerate(zip(kept, ids)) if a != b), len(kept))
        self.ids, self.start, self.answer = ids, min(self.start, same), []
        return True

    def text(self) -> Text:
        return Text(self.number, self.prompt.kind, self.prompt.held_out, self.start, self.ids + self.answer)


def prompt_ids(llm: LLM, number: int, prompt: Prompt, lengths: Lengths) -> list[int]:
    """What the engine is given for the first turn of a prompt."""
    return _Conversation(llm, number, prompt, lengths).ids


def generate(
    llm: LLM,
    prompts: Sequence[Prompt],
    path: Path,
    lengths: Lengths,
    *,
    is_over: Callable[[int], bool],
    progress: bool = True,
) -> int:
    """Answer prompts in their order and append the texts to path. Returns how many it holds.

    is_over: told how many texts there are, says whether it is enough. What is being written then is kept as it is.
    """
    done = {text.prompt for text in read_texts(path)} if path.exists() else set[int]()
    numbers = iter([number for number in range(len(prompts)) if number not in done])
    at_once = 2 * llm.engine.info.max_num_seqs
    room = llm.engine.info.max_model_len
    running: dict[str, _Conversation] = {}
    encoder, num_done = msgspec.json.Encoder(), len(done)

    def submit(conversation: _Conversation) -> None:
        wanted = min(lengths.answer(conversation.prompt), room - len(conversation.ids))
        params = sampling(conversation.number, wanted)
        running[str(conversation.number)] = conversation
        llm.engine.submit(Submit(str(conversation.number), conversation.ids, params))

    with (
        path.open("ab") as file,
        tqdm(total=len(prompts), initial=num_done, unit="text", mininterval=1.0, disable=not progress) as bar,
    ):

        def keep(conversation: _Conversation) -> None:
            if len(conversation.answer) >= MIN_ANSWER or len(conversation.ids) > conversation.start:
                file.write(encoder.encode(conversation.text()) + b"\n")
            bar.update()

        while not is_over(num_done):
            for number in _take(numbers, at_once - len(running)):
                conversation = _Conversation(llm, number, prompts[number], lengths)
                if len(conversation.ids) + MIN_ANSWER <= room:
                    submit(conversation)
            if not running:
                break
            for delta in llm.engine.step().deltas:
                conversation = running[delta.request_id]
                conversation.answer += delta.token_ids
                if delta.finish_reason is None:
                    continue
                del running[delta.request_id]
                if conversation.go_on(room - lengths.chat):
                    submit(conversation)
                else:
                    keep(conversation)
                    num_done += 1
        for conversation in running.values():
            keep(conversation)
    llm.engine.abort_all()
    while llm.engine.has_work:
        llm.engine.step()
    return num_done + len(running)


def sampling(number: int, num_tokens: int, temperature: float | None = None) -> SamplingParams:
    """temperature: None: one of TEMPERATURES, and without what is least likely, since the target goes astray there."""
    if temperature is None:
        temperature, top_p = TEMPERATURES[number % len(TEMPERATURES)], TOP_P
    else:
        top_p = 1.0
    return SamplingParams(max_tokens=max(1, num_tokens), temperature=temperature, top_p=top_p, seed=number)


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return [number for _, number in zip(range(count), numbers)]


def read_texts(path: Path) -> list[Text]:
    """All whole lines. What an interruption left of the last one is cut off the file."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
    decoder = msgspec.json.Decoder(Text)
    return [decoder.decode(line) for line in content[:end].splitlines()]
