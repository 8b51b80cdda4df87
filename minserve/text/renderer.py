"""Chats to prompts, in processes of their own.

Owns: the processes, and what becomes of a chat that takes too long or too much.
Does not know: templates (chat), the limits of a process but for its time (render_process).

A template is a program that came with a model, and what it does with a client's input is anybody's guess. In a thread
it would keep the interpreter from the event loop, and nothing could end it. So each chat is rendered in a process that
can be lost: other streams do not notice, and the next chat gets a new one.
"""

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minserve.errors import RequestError
from minserve.text.chat import ChatTemplate

logger = logging.getLogger("minserve")

NUM_PROCESSES = 2

MAX_CPU_S = 10.0
"""Processor time for one chat. A hundred thousand messages take two or three seconds on a slow core."""


class Renderer:
    """The chat templates of one model. render may be called from any event loop; close ends the processes."""

    def __init__(self, template: ChatTemplate, *, max_cpu_s: float = MAX_CPU_S) -> None:
        self.template = template
        self._max_cpu_s = max_cpu_s
        # One is started ahead, so that the first chat need not wait for it.
        self._idle = [_Process(template, max_cpu_s)]
        self._all = set(self._idle)
        self._closed = False
        self._threads = ThreadPoolExecutor(max_workers=NUM_PROCESSES, thread_name_prefix="render")

    async def render(self, chat: Mapping[str, Any]) -> str:
        """The prompt of a chat, given as the arguments of ChatTemplate.render. Raises RequestError as that does, and
        for a chat that takes too long or too much.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._render, chat)

    def close(self) -> None:
        """End the processes; what they were rendering fails."""
        self._closed = True
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()

    def _render(self, chat: Mapping[str, Any]) -> str:
        try:
            line = json.dumps(chat).encode()
        except RecursionError:
            raise RequestError("the chat is nested too deeply", param="messages") from None
        process = self._take()
        answer = process.ask(line)
        if answer is None:
            self._all.discard(process)
            logger.warning("a process has ended over a chat that it rendered, with code %d", process.close())
            raise RequestError(
                "the chat template cannot render this request: its process ended over it, which may take "
                f"{self._max_cpu_s:g} s of processor time",
                param="messages",
            )
        self._idle.append(process)
        if "text" not in answer:
            raise RequestError(answer["message"], param=answer["param"])
        text: str = answer["text"]
        return text

    def _take(self) -> "_Process":
        """An idle process, or a new one: there are never more of them than threads."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._all.discard(process)
            process.close()
        process = _Process(self.template, self._max_cpu_s)
        self._all.add(process)
        if self._closed:
            process.kill()
        return process


class _Process:
    """One process; asked by one thread at a time."""

    def __init__(self, template: ChatTemplate, max_cpu_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minserve.text.render_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the API process
        )
        setup = {"templates": template.sources, "special_tokens": template.special_tokens, "max_cpu_s": max_cpu_s}
        self._send(json.dumps(setup).encode())

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
