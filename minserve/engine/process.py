"""The engine's own process: receive, step, send, until the socket says so.

Owns: the process and its end. Does not know: HTTP, text.

    python -m minserve.engine.process FD        FD: an inherited socket to the API process

The first message in is an EngineConfig; then ToEngine messages. Out come FromEngine messages. When the socket closes,
nobody is left to serve, and the process ends at once.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue

import msgspec

from minserve.config import EngineConfig
from minserve.engine import wire
from minserve.engine.build import build_engine
from minserve.engine.core import Engine
from minserve.errors import ConfigError, RequestError
from minserve.grammar import COMPILING_STACK_BYTES
from minserve.protocol import (
    Abort,
    Delta,
    Fatal,
    FromEngine,
    Look,
    Outputs,
    Seen,
    Shutdown,
    Starting,
    Stats,
    Submit,
    ToEngine,
)

HEARTBEAT_S = 1.0

COPIES_POLL_S = 1e-4
"""While all that there is to do waits for copies, they are looked at so often."""


class Channel:
    """The engine's end of the socket: blocking reads of exact frames, whole writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Send a message. If the other side is gone the process ends: there is nobody to tell."""
        try:
            self._sock.sendall(wire.encode(self._encoder, message))
        except OSError:
            os._exit(0)

    def receive_config(self) -> EngineConfig:
        return msgspec.msgpack.decode(self._read(), type=EngineConfig)

    def receive(self) -> ToEngine:
        """The next message. EOFError when the other side is gone."""
        message: ToEngine = self._decoder.decode(self._read())
        return message

    def _read(self) -> bytes:
        return self._exactly(wire.body_bytes(self._exactly(wire.HEADER_BYTES)))

    def _exactly(self, num_bytes: int) -> bytes:
        data = self._reader.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError
        return data


class EngineLoop:
    """What the process does all its life. Whatever ends it, but for the socket's end, is raised by `run`."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._inbox: SimpleQueue[ToEngine | Exception] = SimpleQueue()
        self._stopping = False
        self._stats = Stats(num_pages=engine.info.num_pages, num_host_blocks=engine.info.num_host_blocks)
        self._sent_at = time.monotonic()

    def run(self) -> None:
        """Serve until told to shut down."""
        threading.stack_size(COMPILING_STACK_BYTES)
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        threading.stack_size(0)
        while not (self._stopping and not self._engine.has_work):
            self._receive()
            if self._engine.has_work:
                outputs = self._engine.step()
                self._stats = outputs.stats
                if self._engine.is_waiting:
                    time.sleep(COPIES_POLL_S)
                    if time.monotonic() < self._sent_at + HEARTBEAT_S:
                        continue
                self._sent_at = time.monotonic()
                self._channel.send(outputs)

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Submit):
                    self._prepare(message)
                self._inbox.put(message)
        except (EOFError, OSError):
            os._exit(0)
        except Exception as error:  # a message that cannot be read: without its reader the engine would only look alive
            self._inbox.put(error)

    def _prepare(self, submit: Submit) -> None:
        with contextlib.suppress(RequestError):  # which `submit` raises again
            self._engine.prepare(submit)

    def _receive(self) -> None:
        """Take in all that has come; if there is nothing to do, wait for it."""
        try:
            if not self._engine.has_work and not self._stopping:
                self._take(self._inbox.get(timeout=HEARTBEAT_S))
            while True:
                self._take(self._inbox.get_nowait())
        except Empty:
            if not self._engine.has_work:
                self._channel.send(Outputs(deltas=[], stats=self._stats))

    def _take(self, message: ToEngine | Exception) -> None:
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Submit):
            try:
                self._engine.submit(message)
            except RequestError as error:
                ended = Delta(request_id=message.request_id, finish_reason="error", error=error.message)
                self._channel.send(Outputs(deltas=[ended], stats=self._stats))
        elif isinstance(message, Abort):
            self._engine.abort(message.request_id)
        elif isinstance(message, Look):
            self._channel.send(Seen(message.request_id, self._engine.working_set(message.request_id)))
        elif isinstance(message, Shutdown):
            self._stopping = True
            self._engine.abort_all()


def main() -> None:
    """Serve on the inherited socket. Exit codes: 0 told to, 1 failed, 2 the configuration cannot be served."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when we end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        engine = build_engine(channel.receive_config(), _reporter(channel))
        # What lives for ever need not be looked at by every collection: one takes as long as some steps.
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGUSR1, lambda *_: print(engine.report(), file=sys.stderr, flush=True))
        channel.send(engine.info)
        try:
            EngineLoop(engine, channel).run()
        finally:
            engine.close()
        gc.unfreeze()  # or the bindings of libraries report what is left at the end as leaks
    except EOFError:
        sys.exit(0)
    except ConfigError as error:
        channel.send(Fatal(str(error), config=True))
        sys.exit(2)
    except Exception as error:
        traceback.print_exc()
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _reporter(channel: Channel) -> Callable[[str, int, int], None]:
    """Tells the API process of every percent, not of every tensor."""
    sent = ("", 0)

    def report(phase: str, done: int, total: int) -> None:
        nonlocal sent
        now = (phase, 100 * done // max(1, total))
        if now != sent:
            sent = now
            channel.send(Starting(phase, done, total))

    return report


if __name__ == "__main__":
    main()
