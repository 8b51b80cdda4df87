"""An engine without a model: it says what the test scripts, one token a delta, and keeps to the protocol."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from minserve.errors import EngineDeadError
from minserve.protocol import Delta, Ready, SparseUsage, Stats, Submit, TokenLogprobs, WorkingSet
from minserve.text.tokenizer import Tokenizer

EOS = "<|im_end|>"


class FakeEngine:
    """reply: what it says, as a text or as a function of the request; it ends with the end token.

    hold_at: after so many tokens every request waits for release(). fail_at: after so many tokens it fails.
    sparse: what it says of each request's working set, at its end.
    watched: set once a server watches over it, which it does when it listens.
    working_sets: of the requests that are sparse.
    submits: all requests so far. running: ids now running. aborted: ids whose stream was closed early.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int = 4096, max_num_seqs: int = 8) -> None:
        self.tokenizer = tokenizer
        self.reply: str | list[int] | Callable[[Submit], str] = "hello world"
        self.tokens_per_delta = 1
        self.cached_tokens = 0
        self.share_accepted: float | None = None
        self.sparse: SparseUsage | None = None
        self.hold_at: int | None = None
        self.fail_at: int | None = None
        self.submits: list[Submit] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.info = Ready(
            architecture="FakeForCausalLM",
            device="cpu",
            dtype="float32",
            max_model_len=max_model_len,
            vocab_size=tokenizer.token_id_ranges[-1][1],
            num_pages=64,
            num_host_blocks=0,
            kv_cache_bytes=2**20,
            weights_bytes=2**20,
            max_num_seqs=max_num_seqs,
        )
        self.counters = Stats(num_pages=64)
        self.working_sets: dict[str, WorkingSet] = {}
        self.stop_timeouts: list[float] = []
        self.watched = asyncio.Event()
        self._released = asyncio.Event()
        self._changed = asyncio.Condition()
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stopped = asyncio.Event()

    @property
    def stats(self) -> Stats:
        self.counters.num_running = len(self.running)
        return self.counters

    @property
    def alive(self) -> bool:
        return not self._died.done()

    def release(self) -> None:
        """Let held requests go on."""
        self._released.set()

    def die(self, reason: str = "killed by signal 9") -> None:
        """The engine process is gone."""
        self._died.set_result(reason)

    async def working_set(self, request_id: str) -> WorkingSet | None:
        assert request_id in self.running
        return self.working_sets.get(request_id)

    async def wait_dead(self) -> str:
        self.watched.set()
        return await asyncio.shield(self._died)

    async def stop(self, timeout_s: float) -> None:
        self.stop_timeouts.append(timeout_s)
        self._stopped.set()

    async def until(self, condition: Callable[["FakeEngine"], bool]) -> None:
        """Wait for a state of the engine; ten seconds are as good as for ever."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        self.submits.append(submit)
        self.running.add(submit.request_id)
        await self._notify()
        ended = False
        try:
            async for delta in self._deltas(submit):
                ended = delta.finish_reason is not None
                yield delta
        finally:
            self.running.discard(submit.request_id)
            if not ended:
                self.aborted.append(submit.request_id)
            await self._notify()

    async def _deltas(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        params = submit.params
        token_ids = self._reply_ids(submit)
        ends = set() if params.ignore_eos else set(self.tokenizer.eos_token_ids)
        ends |= set(params.stop_token_ids)
        num_tokens = min(len(token_ids), params.max_tokens)
        sent = 0
        while sent < num_tokens:
            if sent == self.hold_at and await self._hold():
                yield Delta(request_id=submit.request_id, finish_reason="abort")
                return
            if sent == self.fail_at:
                yield Delta(request_id=submit.request_id, finish_reason="error", error="out of memory")
                return
            new = token_ids[sent : min(sent + self.tokens_per_delta, num_tokens)]
            stop = next((i for i, token_id in enumerate(new) if token_id in ends), None)
            new = new if stop is None else new[: stop + 1]
            delta = Delta(request_id=submit.request_id, token_ids=new)
            if self.share_accepted is not None:
                delta.draft_tokens, delta.accepted_tokens = (
                    sent + len(new),
                    int((sent + len(new)) * self.share_accepted),
                )
            if sent == 0:
                delta.cached_tokens = self.cached_tokens
                if params.prompt_logprobs is not None:
                    rest = [self._logprobs(i, params.prompt_logprobs) for i in submit.prompt_token_ids[1:]]
                    delta.prompt_logprobs = [None, *rest]
            if params.logprobs is not None:
                delta.logprobs = [self._logprobs(token_id, params.logprobs) for token_id in new]
            sent += len(new)
            if stop is not None:
                delta.finish_reason, delta.stop_token_id = "stop", new[-1]
            elif sent == params.max_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason is not None:
                delta.sparse = self.sparse
            self.counters.generation_tokens += len(new)
            yield delta
            if delta.finish_reason is not None:
                return

    async def _hold(self) -> bool:
        """Wait to be released; whether the engine was stopped meanwhile."""
        waits = [asyncio.ensure_future(f) for f in (self._released.wait(), self._stopped.wait(), self.wait_dead())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*waits, return_exceptions=True)
        if not self.alive:
            raise EngineDeadError(f"the engine has died: {self._died.result()}")
        return self._stopped.is_set() and not self._released.is_set()

    def _reply_ids(self, submit: Submit) -> list[int]:
        reply = self.reply(submit) if callable(self.reply) else self.reply
        if isinstance(reply, list):
            return reply
        return [*self.tokenizer.encode(reply, add_special_tokens=False), self.tokenizer.token_id(EOS)]

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Made-up numbers, of which the last alternative is impossible."""
        other = [(token_id, -0.5), ((token_id + 1) % 256, -1.5), ((token_id + 2) % 256, -math.inf)]
        return TokenLogprobs(token_id, -0.5, 1, other[:num_top])

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
