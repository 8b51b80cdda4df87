"""The API process's side of the engine: starts it, talks to it, notices its death.

Owns: the engine process, the socket, one queue of deltas for each request. Imports no torch.
Does not know: HTTP, text, what the engine does with a request.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from minserve.config import EngineConfig
from minserve.engine import wire
from minserve.errors import ConfigError, EngineDeadError
from minserve.protocol import (
    Abort,
    Delta,
    Fatal,
    FromEngine,
    Look,
    Outputs,
    Ready,
    Seen,
    Shutdown,
    Starting,
    Stats,
    Submit,
    ToEngine,
    WorkingSet,
)

THREADS_ENV = {"GOMP_SPINCOUNT": "1000"}
"""OpenMP's threads spin for milliseconds when they wait for each other, by default. Where the API process or anything
else wants a core at the same time, the spinning thread keeps from it the one that it waits for, and a step on the CPU
takes many times as long."""


def joined(deltas: Sequence[Delta | None]) -> list[Delta | None]:
    """Successive deltas of one request in as few as say the same. A failure stays apart from the tokens before it."""
    whole: list[Delta | None] = []
    for delta in deltas:
        last = whole[-1] if whole else None
        if last is None or delta is None or delta.finish_reason in ("abort", "error"):
            whole.append(delta)
            continue
        last.token_ids.extend(delta.token_ids)
        if last.logprobs is not None:
            last.logprobs.extend(delta.logprobs or ())
        last.finish_reason, last.stop_token_id = delta.finish_reason, delta.stop_token_id
        last.draft_tokens, last.accepted_tokens = delta.draft_tokens, delta.accepted_tokens
        if delta.cached_tokens is not None:
            last.cached_tokens, last.cached_host_tokens = delta.cached_tokens, delta.cached_host_tokens
    return whole


class EngineClient:
    """A running engine. Made by `start`; after `stop`, or when `dead` is set, it serves nothing any more.

    info: what the engine turned out to be. stats: as of its last step. engine_timeout_s: an engine that owes tokens
    and says nothing for so long is taken for frozen and ended.
    """

    info: Ready

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        engine_timeout_s: float,
    ) -> None:
        self.stats = Stats()
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._engine_timeout_s = engine_timeout_s
        self._queues: dict[str, asyncio.Queue[Delta | None]] = {}
        self._looking: dict[str, list[asyncio.Future[WorkingSet | None]]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._listener: asyncio.Task[None] | None = None
        self._stopping = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_starting: Callable[[Starting], None] | None = None,
        engine_timeout_s: float = 120.0,
    ) -> "EngineClient":
        """Spawn the engine and wait until it serves. Raises ConfigError for what the user can mend."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "minserve.engine.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for the API process, which drains first
                env=THREADS_ENV | os.environ,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        client = cls(process, reader, writer, engine_timeout_s)
        try:
            client._send_raw(config)
            client.info = await client._wait_ready(on_starting)
            client.stats = Stats(num_pages=client.info.num_pages, num_host_blocks=client.info.num_host_blocks)
        except BaseException:
            await client._end_process(0)
            raise
        client._listener = asyncio.create_task(client._listen(), name="engine-listener")
        return client

    @property
    def alive(self) -> bool:
        """Whether new requests are served."""
        return not self.dead.done() and not self._stopping

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        """The deltas of a request, up to and with its terminal one. Closing the iterator early aborts the request.

        What waits to be taken comes as one delta, so that who has fallen behind has less to do for each token.
        Raises EngineDeadError if the engine ends before the request does.
        """
        if not self.alive:
            raise EngineDeadError(self.dead.result() if self.dead.done() else "the engine is shutting down")
        assert submit.request_id not in self._queues, f"request id {submit.request_id} is in use"
        queue = self._queues[submit.request_id] = asyncio.Queue()
        finished = False
        try:
            self._send(submit)
            while True:
                waiting = [await queue.get()]
                while not queue.empty():
                    waiting.append(queue.get_nowait())
                for delta in joined(waiting):
                    finished = delta is None or delta.finish_reason is not None
                    if delta is None:
                        raise EngineDeadError(self.dead.result())
                    yield delta
                    if finished:  # the engine may have ended since
                        return
        finally:
            del self._queues[submit.request_id]
            if not finished:
                self._send(Abort(submit.request_id))

    async def working_set(self, request_id: str) -> WorkingSet | None:
        """Which blocks of a sparse request are in pages; None if it is not sparse, or the engine is gone."""
        if not self.alive:
            return None
        seen: asyncio.Future[WorkingSet | None] = asyncio.get_running_loop().create_future()
        self._looking.setdefault(request_id, []).append(seen)
        self._send(Look(request_id))
        return await seen

    def report(self) -> None:
        """Have the engine write what working sets have done, by layer, to stderr."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    async def wait_dead(self) -> str:
        """Wait until the engine is gone, and say why."""
        return await asyncio.shield(self.dead)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Abort what is left and end the engine; after timeout_s it is killed."""
        self._stopping = True
        self._send(Shutdown())
        await self._end_process(timeout_s)
        if self._listener is not None:
            await self._listener

    async def _wait_ready(self, on_starting: Callable[[Starting], None] | None) -> Ready:
        while True:
            try:
                message = await self._receive()
            except (EOFError, OSError) as error:
                code = await self._process.wait()
                raise EngineDeadError(f"the engine ended with code {code} while starting") from error
            if isinstance(message, Ready):
                return message
            if isinstance(message, Fatal):
                raise ConfigError(message.message) if message.config else EngineDeadError(message.message)
            if isinstance(message, Starting) and on_starting is not None:
                on_starting(message)

    async def _listen(self) -> None:
        """Hand out deltas until the engine is gone, then tell everybody."""
        reason = "the engine shut down"
        try:
            while True:
                message = await self._receive_in_time()
                if isinstance(message, Outputs):
                    self._hand_out(message)
                elif isinstance(message, Seen):
                    self._show(message.request_id, message.working_set)
                elif isinstance(message, Fatal):
                    reason = message.message
                    break
        except TimeoutError:
            reason = f"the engine said nothing for {self._engine_timeout_s:.0f} s"
            self._kill()
        except (EOFError, OSError):
            if not self._stopping:
                reason = f"the engine process ended with code {await self._process.wait()}"
        except Exception as error:
            reason = f"the engine sent what cannot be read: {error}"
            self._kill()
        self.dead.set_result(reason)
        for queue in self._queues.values():
            queue.put_nowait(None)
        for request_id in list(self._looking):
            self._show(request_id, None)

    def _show(self, request_id: str, working_set: WorkingSet | None) -> None:
        """To all who look at the request: whoever came last sees what the first one sees."""
        for seen in self._looking.pop(request_id, ()):
            if not seen.done():  # else who looked has left
                seen.set_result(working_set)

    def _hand_out(self, outputs: Outputs) -> None:
        self.stats = outputs.stats
        for delta in outputs.deltas:
            queue = self._queues.get(delta.request_id)
            if queue is not None:  # else its client has left
                queue.put_nowait(delta)

    async def _receive_in_time(self) -> FromEngine:
        # An idle engine sends a heartbeat every second, so silence is always a sign.
        async with asyncio.timeout(self._engine_timeout_s):
            return await self._receive()

    async def _receive(self) -> FromEngine:
        try:
            header = await self._reader.readexactly(wire.HEADER_BYTES)
            message = await self._reader.readexactly(wire.body_bytes(header))
        except asyncio.IncompleteReadError as error:
            raise EOFError from error
        decoded: FromEngine = self._decoder.decode(message)
        return decoded

    def _send(self, message: ToEngine) -> None:
        if not self.dead.done():
            self._send_raw(message)

    def _send_raw(self, message: msgspec.Struct) -> None:
        self._writer.write(wire.encode(self._encoder, message))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _end_process(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        self._writer.close()
