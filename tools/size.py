"""How large the project is: lines of every Python file, and what is over the limits.

Owns: the limits for files and functions, and the budget for all lines that are not tests.
Lines are physical lines, as `wc -l` counts them: comments and docstrings are read too.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("minserve", "kernels", "models", "tools", "tests")

WARN_FILE_LINES = 250
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 70
BUDGET_LINES = 6000
"""All lines outside tests/. A commit may raise it, and says why."""


def python_files(room: str) -> list[Path]:
    """Python files of a top-level folder; minserve/kernels and minserve/models are counted where they link to."""
    files = [path for path in (ROOT / room).rglob("*") if path.is_file() and is_python(path)]
    return sorted(path for path in files if not any(parent.is_symlink() for parent in path.parents))


def is_python(path: Path) -> bool:
    return path.suffix == ".py" or (path.suffix == "" and path.read_bytes().startswith(b"#!/usr/bin/env python"))


def long_functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function that is longer than MAX_FUNCTION_LINES."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield node.name, num_lines


def main() -> int:
    warnings: list[str] = []
    failures: list[str] = []
    totals: dict[str, int] = {}
    for room in ROOMS:
        totals[room] = 0
        for path in python_files(room):
            source = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            num_lines = source.count("\n")
            totals[room] += num_lines
            print(f"{num_lines:6}  {name}")
            if num_lines > MAX_FILE_LINES:
                failures.append(f"{name} has {num_lines} lines; a file may have {MAX_FILE_LINES}")
            elif num_lines > WARN_FILE_LINES:
                warnings.append(f"{name} has {num_lines} lines; about {WARN_FILE_LINES} is wanted")
            for function, length in long_functions(ast.parse(source)):
                failures.append(f"{name}: {function} has {length} lines; a function may have {MAX_FUNCTION_LINES}")

    num_counted = sum(lines for room, lines in totals.items() if room != "tests")
    if num_counted > BUDGET_LINES:
        failures.append(f"{num_counted} lines outside tests/; the budget is {BUDGET_LINES} (tools/size.py)")
    print("  ".join(f"{room} {lines}" for room, lines in totals.items()))
    print(f"outside tests: {num_counted} of {BUDGET_LINES}")
    for line in warnings:
        print(f"warning: {line}")
    for line in failures:
        print(f"FAILED: {line}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
