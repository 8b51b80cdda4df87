"""What the routes share: the engine, the text side, admission, and the work that is done off the event loop.

Owns: the number of choices in flight, and whether new work is taken.
Does not know: routes, JSON, signals.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from aiohttp import web

from minserve.api.engine import Engine
from minserve.config import ServerConfig
from minserve.errors import NotFoundError, OverloadedError
from minserve.metrics import Metrics
from minserve.text.reasoning import CLOSE, reasoning_format
from minserve.text.renderer import Renderer
from minserve.text.tokenizer import Tokenizer

LONG_TEXT_CHARS = 2048
"""Text shorter than this is tokenized on the spot: a thread would cost more."""

DRAIN_RETRY_AFTER_S = 30
FULL_RETRY_AFTER_S = 2

KEEP_ALIVE_S = 10.0
"""Proxies cut connections that are silent for some 30 to 60 seconds."""

STALL_S = 30.0
"""A client that reads nothing for so long holds a place that others want."""

T = TypeVar("T")


class Service:
    """One model behind the routes. reasoning: how its reasoning is told from its answers, if it is.

    Raises ConfigError for a reasoning parser that there is not. Whoever made engine and renderer ends them.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        renderer: Renderer,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.reasoning = reasoning_format(
            config.reasoning_parser, template_closes_tag=renderer.template.mentions(CLOSE)
        )
        self.keep_alive_s = keep_alive_s
        self.stall_s = stall_s
        self.created = int(time.time())
        self.metrics = Metrics(self.model_name, lambda: engine.stats)
        self.draining = False
        self._num_choices = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    @property
    def model_name(self) -> str:
        return self.config.served_model_names[0]

    @property
    def ready(self) -> bool:
        return self.engine.alive and not self.draining

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries. Raises NotFoundError for a model that is not served here."""
        if name is None:
            return self.model_name
        if name not in self.config.served_model_names:
            served = ", ".join(self.config.served_model_names)
            raise NotFoundError(
                f"The model {name[:200]!r} does not exist; served: {served}", param="model", code="model_not_found"
            )
        return name

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[None]:
        """Hold room for num_choices texts. Raises OverloadedError when the queue is full or the server is ending.

        Counted here and not from the engine's gauges, which are a step old: a burst must not pass them.
        """
        if not self.engine.alive:
            raise OverloadedError("the engine has died; the server is going down", code="engine_dead")
        if self.draining:
            raise OverloadedError(
                "the server is shutting down", retry_after_s=DRAIN_RETRY_AFTER_S, code="shutting_down"
            )
        most = self.engine.info.max_num_seqs + self.config.max_num_waiting
        if self._num_choices >= most:
            raise OverloadedError(
                f"the server is full: {most} requests are running or waiting",
                retry_after_s=FULL_RETRY_AFTER_S,
                code="queue_full",
            )
        self._num_choices += num_choices
        self._idle.clear()
        try:
            yield
        finally:
            self._num_choices -= num_choices
            if self._num_choices == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no choice is in flight."""
        await self._idle.wait()

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """work(), in a thread if its size (in characters or tokens) is worth one."""
        if size < LONG_TEXT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads; work in them is finished first."""
        self._threads.shutdown(wait=False, cancel_futures=True)


SERVICE = web.AppKey("service", Service)
