"""Grammars tried before any work is done for them, in a process that can be lost.

Owns: what is remembered of grammars that were tried. Does not know: how they are compiled (minserve.grammar), who sent
them.
"""

import json
import signal
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from minserve.errors import OverloadedError, RequestError
from minserve.grammar import MAX_GRAMMAR_BYTES, Vocabulary
from minserve.text.processes import ProcessEndedError, Processes

MAX_CPU_S = 2.0
"""Processor time for one grammar. The largest schemas of real programs take some tenths of a second."""

NUM_REMEMBERED = 64


class GrammarCheck:
    """Says what is wrong with a grammar, if anything is. Its processes are started when the first one comes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, max_cpu_s: float = MAX_CPU_S) -> None:
        self._vocabulary = vocabulary
        self._max_cpu_s = max_cpu_s
        self._processes: Processes | None = None
        self._tried: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def check(self, grammar: str, param: str) -> str:
        """The grammar as the engine takes it. Raises RequestError, naming param, for one that cannot be compiled."""
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"{param} is too large: as JSON it may have {MAX_GRAMMAR_BYTES} characters, it has {len(grammar)}",
                param=param,
            )
        answer = self._tried.pop(grammar, None) or await self._ask(grammar)
        self._tried[grammar] = answer
        while len(self._tried) > NUM_REMEMBERED:
            self._tried.popitem(last=False)
        if answer["fault"] is not None:
            raise RequestError(f"{param} cannot be used: {answer['fault']}", param=param)
        canonical: str = answer["grammar"]
        return canonical

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()

    async def _ask(self, grammar: str) -> dict[str, Any]:
        self._processes = self._processes or Processes("minserve.text.grammar_process", self._setup(), ahead=0)
        try:
            return await self._processes.ask(json.dumps(grammar).encode())
        except ProcessEndedError as error:
            if error.code == -signal.SIGKILL:  # by somebody else: it says nothing about the grammar
                raise OverloadedError("the process that tries grammars has been ended; try again") from None
            return {"fault": "it is nested too deeply, or takes too long to compile"}

    def _setup(self) -> bytes:
        vocabulary = self._vocabulary()
        first = {
            "max_cpu_s": self._max_cpu_s,
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "special_token_ids": sorted(vocabulary.special_token_ids),
            "end_token_ids": vocabulary.end_token_ids,
        }
        return json.dumps(first).encode()
