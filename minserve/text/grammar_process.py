"""A process that tries grammars: one line of JSON in, one out, until its input ends.

Owns: the stack on which a grammar is tried. Does not know: who asks (grammar_check), the limits (lines).

    python -m minserve.text.grammar_process

The first line holds the vocabulary, every further one a grammar.
The compiler recurses as deep as the grammar does, and a stack that overflows ends the process. What fits into this one
fits into the engine's, which is many times as large.
"""

import json
import threading
from functools import partial
from typing import Any

from minserve.grammar import TRYING_STACK_BYTES, Trial, Vocabulary
from minserve.text.grammars import canonical
from minserve.text.lines import Answer, serve_lines


def _begin(first: dict[str, Any]) -> Answer:
    vocabulary = Vocabulary(
        tokens=[token.encode("latin-1") for token in first["tokens"]],
        special_token_ids=frozenset(first["special_token_ids"]),
        end_token_ids=tuple(first["end_token_ids"]),
        encode=lambda text: [],  # any spelling will do
    )
    trial = Trial(vocabulary)
    threading.stack_size(TRYING_STACK_BYTES)
    return partial(_answer, trial)


def _answer(trial: Trial, line: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = {"fault": "it is too much to compile"}
    thread = threading.Thread(target=lambda: answer.update(_try(trial, json.loads(line))))
    thread.start()
    thread.join()
    return answer


def _try(trial: Trial, grammar: str) -> dict[str, Any]:
    try:
        grammar = canonical(grammar)
        return {"grammar": grammar, "fault": trial.fault(grammar)}
    except (MemoryError, RecursionError) as error:
        return {"fault": f"it is too much to compile: {type(error).__name__}"}
    except Exception as error:  # a GBNF source that is wrong, or that meets a bug of its translation
        return {"fault": f"{error}"[:400]}


if __name__ == "__main__":
    serve_lines(_begin)
