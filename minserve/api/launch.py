"""From a configuration to a running server: start the engine, say what it turned out to be, serve, end.

Owns: signals, and what the user reads at start-up.
Does not know: argv; which engine it starts.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from minserve.api.engine import Engine
from minserve.api.server import EXIT_ENGINE_DIED, EXIT_OK, Server, address_of
from minserve.api.service import Service
from minserve.config import BLOCK_SIZE, EngineConfig, ServerConfig
from minserve.errors import EngineDeadError
from minserve.protocol import Ready, Starting
from minserve.text.chat import ChatTemplate
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
    loop = asyncio.get_running_loop()
    loading = asyncio.ensure_future(start_engine(engine_config, on_starting=_log_starting))
    try:
        _on_signals(loop, loading.cancel)
        engine = await loading
        server = Server(Service(config, engine, tokenizer, template), sock)
        _on_signals(loop, server.request_stop)
        await server.start()
        for line in describe(config, engine.info):
            logger.info(line)
        logger.info("ready at %s (OpenAI API under /v1)", address_of(sock))
        return await server.run()
    except asyncio.CancelledError:
        logger.info("stopped while loading")
        return EXIT_OK
    except EngineDeadError as error:
        logger.error("the engine died while loading: %s", error)
        return EXIT_ENGINE_DIED
    finally:
        sock.close()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def describe(config: ServerConfig, info: Ready) -> list[str]:
    """What the server turned out to be, in a few lines."""
    keys = "any client may call" if not config.api_keys else "an API key is needed"
    return [
        f"model {', '.join(config.served_model_names)}: {info.architecture}, {info.dtype} on {info.device}, "
        f"weights {info.weights_bytes / 2**30:.2f} GiB",
        f"context {info.max_model_len} tokens; KV cache {info.num_pages} pages of {BLOCK_SIZE} tokens "
        f"({info.num_pages * BLOCK_SIZE} tokens, {info.kv_cache_bytes / 2**30:.2f} GiB)",
        f"up to {info.max_num_seqs} requests at once, {config.max_num_waiting} waiting; {keys}",
    ]


def _log_starting(starting: Starting) -> None:
    logger.info(starting.message)


def _on_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], object]) -> None:
    for number in SIGNALS:
        loop.add_signal_handler(number, act)
