"""The real command as a process, on a free port of this machine."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

START_S = 300.0
"""The default model may have to be fetched and converted first."""

END_S = 60.0

SMALL = ("--device", "cpu", "--kv-cache-memory", "512MiB")


def engine_process_of(pid: int) -> int:
    """The only child of a process that runs an engine."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [engine] = [int(child) for child in children if b"minserve.engine" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return engine


class RealServer:
    """`python -m minserve` from its start until it is ready. Its lines are kept for when a test fails.

    module: what is run instead, and its own first arguments.
    """

    def __init__(self, *flags: str, module: tuple[str, ...] = ("minserve",)) -> None:
        command = [sys.executable, "-m", *module, "--port", "0", *SMALL, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_ready()

    @property
    def faults(self) -> list[str]:
        """Lines that tell of a fault of ours: tracebacks, answers with a status of 5xx (see the access log), leaks that
        libraries report at the end."""
        signs = re.compile(r"Traceback|leaked|/\S* 5\d\d \d+ ms id=")
        return [line for line in self.lines if signs.search(line)]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def kill_engine(self) -> None:
        """SIGKILL to the engine process."""
        os.kill(engine_process_of(self.process.pid), signal.SIGKILL)

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(END_S)
        self._reader.join(END_S)
        return code

    def end(self) -> None:
        """Whatever has happened: no process is left."""
        if self.process.poll() is None:
            self.signal()
            self.signal()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._arrived.put(line)
        self._arrived.put(None)

    def _wait_ready(self) -> str:
        while (line := self._arrived.get(timeout=START_S)) is not None:
            if match := re.search(r"ready at (http://\S+)", line):
                return match[1]
        raise RuntimeError("the server did not start:\n" + "".join(self.lines))


Start = Callable[..., RealServer]
