"""How large the project is: lines of every Python file, and what is over the limits.

Owns: the limits for files and functions, and the budget for all code that is not tests.
Files and functions are limited in lines, as `wc -l` counts them, since all of them are read. The budget counts lines of
code, without blank lines, comments and docstrings, since nobody should save by explaining less.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("minserve", "kernels", "models", "tools", "tests")

WARN_FILE_LINES = 250
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 70
BUDGET_CODE_LINES = 23250
"""Lines of code outside tests/. A commit may raise it, and says why.

6000 was a guess made before the HTTP surface was there. 7500: the dense server took 6450, part of it to refuse by name
what is wrong in flags, fields and model files, which nobody would give back; the host tier took 600 more. 11000: a
GPU's kernels (1300), graphs, fixed shapes and FP8 (500), and the benchmarks that set all of it beside vLLM (1100).
12000: reasoning, streamed calls in two formats, processes for templates (600), and what a server that strangers reach
needs (600): room for each key, slow clients, other origins, /openapi.json. 14200: the training of draft heads (1250),
a tenth of it the questions that a model is asked. 15600: structured output (600), half of it to say what is wrong with
a request and to try a client's grammar where it can do no harm; the arithmetic of working sets (410); 200 had gone
unnoticed before. 18000: sparse requests (1700): the device's half, the scheduler's, and what users see of them: flags
and which of them go together, usage, metrics; the stream of figures that people look at, and the route of the page
(270; the page itself is no Python and not counted: a test holds it to 100 KB); /v1/responses (700), a third of it the
shapes of its items and events; a script that tries the clients that people have (250).
20200: the kernels of working sets for a GPU (1000); what says how good the choices of sparse requests are, question by
question (810). 20500: what a burst waits for, and a client that tells it from its own lateness (90); what it costs that
somebody looks at the page (130); a crowd of long requests and one long text, timed (60). 22300: working sets on a GPU
(500): host memory that it addresses, copies beside steps, the order of a step's two halves; and the benchmark of that
beside vLLM (1000). 22550: the link's budget (60), ranking in two kernels, with digests that are found by it to say more
(150), and 8-bit host blocks in the benchmark (40). 22750: what is done once in a sparse step by a kernel where it was a
dozen, beside the torch that a CPU runs (70), and what ranks and selects, timed alone (40). 22850: order between the
halves of a step by flags in the GPU's memory (80), and fetches with two blocks under way (20). 23250: a second look at
blocks: digests of two kinds, shortlists (120), and scores by levels, two numbers of float16 at a time (280).
"""

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


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


def count_code_lines(source: str, tree: ast.Module) -> int:
    """Lines on which a token of code stands. A string that is a statement by itself is a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> int:
    warnings: list[str] = []
    failures: list[str] = []
    code_lines = dict.fromkeys(ROOMS, 0)
    print(" lines   code")
    for path in (path for room in ROOMS for path in python_files(room)):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        name = path.relative_to(ROOT).as_posix()
        num_lines, num_code_lines = source.count("\n"), count_code_lines(source, tree)
        code_lines[name.partition("/")[0]] += num_code_lines
        print(f"{num_lines:6} {num_code_lines:6}  {name}")
        if num_lines > MAX_FILE_LINES:
            failures.append(f"{name} has {num_lines} lines; a file may have {MAX_FILE_LINES}")
        elif num_lines > WARN_FILE_LINES:
            warnings.append(f"{name} has {num_lines} lines; about {WARN_FILE_LINES} is wanted")
        for function, length in long_functions(tree):
            failures.append(f"{name}: {function} has {length} lines; a function may have {MAX_FUNCTION_LINES}")

    num_counted = sum(lines for room, lines in code_lines.items() if room != "tests")
    if num_counted > BUDGET_CODE_LINES:
        failures.append(f"{num_counted} lines of code outside tests/; the budget is {BUDGET_CODE_LINES}")
    print("code:  " + "  ".join(f"{room} {lines}" for room, lines in code_lines.items()))
    print(f"code outside tests/: {num_counted} of {BUDGET_CODE_LINES} lines")
    for line in warnings:
        print(f"warning: {line}")
    for line in failures:
        print(f"FAILED: {line}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
