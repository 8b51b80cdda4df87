"""What was found, for people and for programs: tables, and a JSON line for every row.

Owns: how numbers are shown. Does not know: what they mean.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Names and values, in the order in which they are shown. Lists are for programs and plots only."""


class Report:
    """Writes to FOLDER/QUESTION.jsonl and to the terminal. about: what all rows have in common, for programs."""

    def __init__(self, folder: Path, about: Row) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._about = folder, about

    def add(self, question: str, title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
        """columns: what is shown, if not all that is no list."""
        with (self.folder / f"{question}.jsonl").open("w") as file:
            file.writelines(json.dumps({"question": question} | row | self._about) + "\n" for row in rows)
        print(f"\n{title}\n{table(rows, columns)}", flush=True)


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Aligned, names on top."""
    names = columns or [name for name, value in rows[0].items() if not isinstance(value, list)]
    lines = [[name.replace("_", " ") for name in names], *[[shown(row[name]) for name in names] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def shown(value: Any) -> str:
    """A cell."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
