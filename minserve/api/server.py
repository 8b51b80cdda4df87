"""The server's life: bind, serve, drain, end.

Owns: the listening socket, the order and the time limits of a stop, the exit code.
Does not know: routes, argv, how the engine works.

A stop, in order: no new work (/ready is 503), running requests finish within shutdown_timeout_s, the engine ends what
is left (each gets an error event), connections close. A second request to stop skips the wait.
"""

import asyncio
import errno
import logging
import socket
from typing import Any

from aiohttp import web

from minserve.api.activity import log_activity
from minserve.api.app import build_app
from minserve.api.connections import Connections, room_for_connections
from minserve.api.service import Service
from minserve.errors import ConfigError

logger = logging.getLogger("minserve")

STALL_S = 30.0
"""A client that reads nothing of its answer for so long holds a place that others want."""

IDLE_S = 75.0
"""A connection without a request, or with headers that never end, is closed after so long. Proxies keep theirs for 60
s; the side that sends requests should be the first to close."""

ENGINE_STOP_S = 10.0
SETTLE_S = 2.0
"""For handlers to write their last events once the engine has ended."""

EXIT_OK = 0
EXIT_ENGINE_DIED = 1

BACKLOG = 2048

NUM_LISTENERS = 16
"""libuv takes in one client in each turn of the loop, for each socket that listens. So several do, which are one to the
kernel: else a burst would wait in the kernel's queue, together with all those who can only be refused."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError. Done first, since loading a model takes long."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is already in use; choose another with --port") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL that a bound socket answers at."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """A service behind a socket."""

    def __init__(
        self, service: Service, sock: socket.socket, *, stall_s: float = STALL_S, idle_s: float = IDLE_S
    ) -> None:
        self._service = service
        self._sock = sock
        # Without cancellation a handler would never learn that its client has gone.
        self.app = build_app(service)
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=idle_s,
            shutdown_timeout=SETTLE_S,
        )
        self._stall_s = stall_s
        self._listeners: list[asyncio.Server] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._activity: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if another server that was bound to the port too has come first."""
        await self._runner.setup()
        assert self._runner.server is not None
        most = room_for_connections(self._service.config.max_connections)
        connections = Connections(self._runner.server, most, self._stall_s)
        self._service.metrics.gauge("minserve:connections", "Clients connected", lambda: connections.num_open)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel's own watch over what is too little to fill our buffer
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._stall_s * 1000))
        for _ in range(NUM_LISTENERS):
            self._listeners.append(await self._listen(connections))
        self._activity = asyncio.create_task(log_activity(lambda: self._service.engine.stats))

    async def _listen(self, connections: Connections) -> asyncio.Server:
        """One more listener on the socket."""
        sock = self._sock.dup()
        try:
            return await asyncio.get_running_loop().create_server(connections, sock=sock, backlog=BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen at {address_of(self._sock)}: {error.strerror}") from None

    def request_stop(self) -> None:
        """Drain; asked a second time, end at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._service.admission.drain()
        self._stop.set()

    async def run(self) -> int:
        """Serve until a stop is requested or the engine dies; the process's exit code."""
        engine = self._service.engine
        died = asyncio.create_task(engine.wait_dead())
        try:
            await _first(died, self._stop.wait())
            if not died.done():
                await self._drain(died)
            exit_code = EXIT_OK
            if died.done():
                logger.error("the engine has died: %s", died.result())
                exit_code = EXIT_ENGINE_DIED
            await engine.stop(0.0 if died.done() or self._hurry.is_set() else ENGINE_STOP_S)
            # For the last events of the streams that were still open.
            await _first(self._service.admission.wait_idle(), timeout_s=SETTLE_S)
            return exit_code
        finally:
            died.cancel()
            await self.close()

    async def _drain(self, died: "asyncio.Task[str]") -> None:
        timeout_s = self._service.config.shutdown_timeout_s
        logger.info("stopping: running requests have %g s to finish; once more to stop at once", timeout_s)
        await _first(died, self._hurry.wait(), self._service.admission.wait_idle(), timeout_s=timeout_s)

    async def close(self) -> None:
        """End what start() began; run() has done it when it returns."""
        if self._activity is not None:
            self._activity.cancel()
        for listener in self._listeners:
            listener.close()
        self._sock.close()
        await self._runner.cleanup()
        self._service.close()


async def _first(*awaitables: Any, timeout_s: float | None = None) -> None:
    """Returns when one of them is done, or after the timeout. Tasks given stay; what it made itself it cancels."""
    made = [asyncio.ensure_future(item) for item in awaitables]
    try:
        await asyncio.wait(made, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for item, task in zip(awaitables, made, strict=True):
            if task is not item:
                task.cancel()
