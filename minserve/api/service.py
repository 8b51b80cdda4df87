"""What the routes share: the engine, the text side, the door, and the work that is done off the event loop.

Owns: the names that are served, and the threads.
Does not know: routes, JSON, signals.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from minserve.api.admission import Admission
from minserve.api.body import BODY_S, BodyReader
from minserve.api.engine import Engine
from minserve.api.in_flight import InFlight
from minserve.api.turns import Turns
from minserve.config import ServerConfig
from minserve.errors import NotFoundError
from minserve.grammar import Vocabulary
from minserve.metrics import Metrics
from minserve.text.grammar_check import GrammarCheck
from minserve.text.reasoning import CLOSE, reasoning_format
from minserve.text.renderer import Renderer
from minserve.text.tokenizer import Tokenizer
from minserve.text.vocabulary import vocabulary_of

LONG_TEXT_CHARS = 2048
"""Text shorter than this is tokenized on the spot: a thread would cost more."""

KEEP_ALIVE_S = 10.0
"""Proxies cut connections that are silent for some 30 to 60 seconds."""

STATS_INTERVAL_S = 1.0
"""Between two events for those who look at the server's figures."""

MIN_MAX_REQUEST_BYTES = 4 * 2**20
REQUEST_BYTES_PER_TOKEN = 32
"""How large a body may be unless the command says: what fills the context several times over, however it is spelled."""

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
        body_s: float = BODY_S,
        stats_interval_s: float = STATS_INTERVAL_S,
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.reasoning = reasoning_format(
            config.reasoning_parser, template_closes_tag=renderer.template.mentions(CLOSE)
        )
        self.grammars = GrammarCheck(self._vocabulary)
        self.in_flight = InFlight()
        self.keep_alive_s = keep_alive_s
        self.stats_interval_s = stats_interval_s
        self.created = int(time.time())
        self.metrics = Metrics(self.model_name, lambda: engine.stats)
        self.admission = Admission(engine, config)
        max_bytes = max(MIN_MAX_REQUEST_BYTES, REQUEST_BYTES_PER_TOKEN * engine.info.max_model_len)
        self.turns = Turns(self.admission.is_refusing)
        self.bodies = BodyReader(config.max_request_bytes or max_bytes, self.turns, self.off_loop, body_s)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    @property
    def model_name(self) -> str:
        return self.config.served_model_names[0]

    def _vocabulary(self) -> Vocabulary:
        width = self.engine.info.vocab_size
        ends = tuple(token_id for token_id in self.tokenizer.eos_token_ids if token_id < width)
        return vocabulary_of(self.tokenizer, width, ends)

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

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """work(), in a thread if its size (in characters or tokens) is worth one."""
        if size < LONG_TEXT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads, whose work is finished first, and the processes that try grammars."""
        self.grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


SERVICE = web.AppKey("service", Service)
