"""From a configuration to a running server: start the engine, say what it turned out to be, serve, end.

Owns: signals, and what the user reads at start-up.
Does not know: argv; which engine it starts.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol

from tqdm import tqdm

from minserve.api.engine import Engine
from minserve.api.server import EXIT_ENGINE_DIED, EXIT_OK, Server, address_of
from minserve.api.service import Service
from minserve.config import BLOCK_SIZE, EngineConfig, ServerConfig
from minserve.errors import ConfigError, EngineDeadError
from minserve.protocol import Ready, Starting
from minserve.text.chat import ChatTemplate
from minserve.text.renderer import Renderer
from minserve.text.tokenizer import Tokenizer

logger = logging.getLogger("minserve")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StartEngine(Protocol):
    """Starts an engine and returns when it is ready. Raises ConfigError or EngineDeadError."""

    def __call__(self, config: EngineConfig, *, on_starting: Callable[[Starting], None]) -> Awaitable[Engine]: ...


async def launch(
    config: ServerConfig,
    engine_config: EngineConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    start_engine: StartEngine,
    sock: socket.socket,
) -> int:
    """Serve on a bound socket until told to stop; the process's exit code."""
    logger.info("loading %s from %s", config.served_model_names[0], config.model_path)
    if engine_config.draft_path is not None:
        logger.info("loading the draft head %s", engine_config.draft_path)
    loop = asyncio.get_running_loop()
    bar = LoadingBar()
    renderer = Renderer(template)
    loading = asyncio.ensure_future(start_engine(engine_config, on_starting=bar.show))
    try:
        _on_signals(loop, loading.cancel)
        engine = await loading
        bar.close()
        return await _serve(config, engine, tokenizer, renderer, sock)
    except asyncio.CancelledError:
        logger.info("stopped while loading")
        return EXIT_OK
    except EngineDeadError as error:
        logger.error("the engine died while loading: %s", error)
        return EXIT_ENGINE_DIED
    finally:
        bar.close()
        renderer.close()
        sock.close()
        for number in (*SIGNALS, signal.SIGUSR1):
            loop.remove_signal_handler(number)


async def _serve(
    config: ServerConfig, engine: Engine, tokenizer: Tokenizer, renderer: Renderer, sock: socket.socket
) -> int:
    service = Service(config, engine, tokenizer, renderer)
    server = Server(service, sock)
    _on_signals(asyncio.get_running_loop(), server.request_stop)
    try:
        await server.start()
    except ConfigError:
        await server.close()
        await engine.stop(0.0)
        raise
    for line in describe(config, engine.info):
        logger.info(line)
    if service.reasoning is not None:
        logger.info("reasoning is set apart from answers, in the format of %s", service.reasoning.name)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.report)
    # What lives for ever need not be looked at by every collection: one would hold up all streams for 30 to 50 ms.
    gc.collect()
    gc.freeze()
    logger.info("ready at %s (OpenAI API under /v1)", address_of(sock))
    try:
        return await server.run()
    finally:
        gc.unfreeze()


def describe(config: ServerConfig, info: Ready) -> list[str]:
    """What the server turned out to be, in a few lines."""
    keys = "any client may call" if not config.api_keys else "an API key is needed"
    return [
        f"model {', '.join(config.served_model_names)}: {info.architecture}, {info.dtype} on {info.device}, "
        f"weights {info.weights_bytes / 2**30:.2f} GiB",
        f"context {info.max_model_len} tokens; KV cache {info.num_pages} pages of {BLOCK_SIZE} tokens "
        f"({info.num_pages * BLOCK_SIZE} tokens, {info.kv_cache_bytes / 2**30:.2f} GiB)"
        + (f"; host KV {info.num_host_blocks * BLOCK_SIZE} tokens" if info.num_host_blocks else "")
        + (f", over a link of {info.link_bytes_s / 1e9:.1f} GB/s" if info.link_bytes_s else ""),
        *([info.draft] if info.draft else []),
        *([_sparse_line(info.num_working_set_blocks)] if info.num_working_set_blocks else []),
        f"up to {info.max_num_seqs} requests at once, {config.max_num_waiting} waiting; {keys}",
    ]


def _sparse_line(num_blocks: int) -> str:
    return f"sparse requests keep {num_blocks} blocks ({num_blocks * BLOCK_SIZE} tokens) of each KV head in pages"


class LoadingBar:
    """How far the engine's start is: a bar for each phase on a terminal, nothing in a log."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None
        self._phase = ""

    def show(self, starting: Starting) -> None:
        """Take the engine's word for how far it is."""
        if self._bar is None or starting.phase != self._phase:
            self.close()
            unit, scale = ("B", True) if starting.phase == "weights" else ("it", False)
            self._phase = starting.phase
            self._bar = tqdm(total=starting.total, desc=starting.phase, unit=unit, unit_scale=scale, disable=None)
        self._bar.update(starting.done - self._bar.n)

    def close(self) -> None:
        """Leave the terminal to others."""
        if self._bar is not None:
            self._bar.close()


def _on_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], object]) -> None:
    for number in SIGNALS:
        loop.add_signal_handler(number, act)
