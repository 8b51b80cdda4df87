"""What a process does that can be lost: answer lines, under limits, until its input ends.

Owns: the limits. Does not know: what the lines ask for (render_process, grammar_process), who asks (processes).

A line that takes more processor time than its share ends the process, by the kernel's hand: no loop in C or Python can
be in the way. More memory than MAX_MEMORY_BYTES is a MemoryError, and so an answer. JSON and not msgpack, because
clients' numbers may have any length.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MAX_MEMORY_BYTES = 2 * 2**30

Answer = Callable[[bytes], dict[str, Any]]


def serve_lines(begin: Callable[[dict[str, Any]], Answer]) -> None:
    """Serve standard input. begin: what answers the lines behind the first, given that one; its max_cpu_s is the time
    that each may take."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = json.loads(sys.stdin.buffer.readline() or "null")
    if first is None:
        return
    answer = begin(first)
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            return  # The other side has gone in the middle of it.
        signal.setitimer(signal.ITIMER_PROF, first["max_cpu_s"])
        answered = json.dumps(answer(line)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            sys.stdout.buffer.write(answered + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # There is nobody to tell.
