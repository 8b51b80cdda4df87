"""Processes that do what may end badly: one line of JSON in, one out.

Owns: the processes, and their replacement when one was lost. Does not know: what they do (renderer, grammar_check).

What clients send may take a template or a compiler for ever, or overflow its stack. In a thread it would keep the
interpreter from the event loop, or take everybody with it. So it is done in a process that can be lost: other streams
do not notice, and the next request gets a new one.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NUM_PROCESSES = 2


class ProcessEndedError(Exception):
    """The process ended over what it was asked. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


class Processes:
    """Some processes of one kind. ask may be called from any event loop; close ends them.

    module: what they run; setup: the first line that they are given; ahead: how many are started at once, so that the
    first question need not wait.
    """

    def __init__(self, module: str, setup: bytes, *, ahead: int) -> None:
        self._module = module
        self._setup = setup
        self._idle = [_Process(module, setup) for _ in range(ahead)]
        self._all = set(self._idle)
        self._closed = False
        self._threads = ThreadPoolExecutor(max_workers=NUM_PROCESSES, thread_name_prefix=module.rpartition(".")[2])

    async def ask(self, line: bytes) -> dict[str, Any]:
        """The answer to a line. Raises ProcessEndedError if there is none."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, line)

    def close(self) -> None:
        """End the processes; what they were doing fails."""
        self._closed = True
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()

    def _ask(self, line: bytes) -> dict[str, Any]:
        process = self._take()
        answer = process.ask(line)
        if answer is None:
            self._all.discard(process)
            raise ProcessEndedError(process.close())
        self._idle.append(process)
        return answer

    def _take(self) -> "_Process":
        """An idle process, or a new one: there are never more of them than threads."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._all.discard(process)
            process.close()
        process = _Process(self._module, self._setup)
        self._all.add(process)
        if self._closed:
            process.kill()
        return process


class _Process:
    """One process; asked by one thread at a time."""

    def __init__(self, module: str, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the API process
        )
        self._send(setup)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes) -> dict[str, Any] | None:
        """The answer to a line; None if the process has ended over it."""
        self._send(line)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            return None
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> int:
        """Leave nothing of it; its exit code."""
        self._process.kill()
        code = self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # What it never read
            self._process.stdin.close()
        return code

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ask finds the end of its output
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
