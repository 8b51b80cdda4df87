"""The prompts that a target answers: a file of them, one JSON object a line, compressed.

Owns: the file, and which prompts are held out. Does not know: where they come from, tokens, models.
"""

import lzma
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

HELD_OUT_SHARE = 0.02


class Prompt(msgspec.Struct, omit_defaults=True):
    """kind "chat": turns are what the user says, one answer after each. kind "document": a long text, to be gone on
    with, or to be asked about if there is a turn.

    group: for the table of results. held_out: never trained on.
    """

    kind: Literal["chat", "document"]
    group: str
    turns: list[str] = []
    text: str = ""
    held_out: bool = False


def is_held_out(name: str) -> bool:
    """Whether what has this name is for evaluation: always the same answer, of any file and order."""
    return zlib.crc32(name.encode()) % 1000 < 1000 * HELD_OUT_SHARE


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """path: ends in .xz."""
    with lzma.open(path, "wb", preset=3) as file:
        for prompt in prompts:
            file.write(msgspec.json.encode(prompt) + b"\n")


def read_prompts(path: Path) -> list[Prompt]:
    """All of a file, in its order."""
    decoder = msgspec.json.Decoder(Prompt)
    with lzma.open(path, "rb") as file:
        return [decoder.decode(line) for line in file]
