"""From the engine's tokens to pieces of text: one choice of a request, and several side by side.

Owns: where a choice's text, token count and logprobs end, and why.
Does not know: HTTP, JSON shapes, chat or completions.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec

from minserve.api.engine import Engine
from minserve.errors import EngineError
from minserve.metrics import RequestTimer
from minserve.protocol import Delta, Submit, TokenLogprobs
from minserve.text.detokenizer import Detokenizer

EndReason = Literal["stop", "length"]


class Piece(msgspec.Struct, kw_only=True):
    """What one message of the engine added to one choice.

    token_ids and logprobs end where the choice ends, even if the engine had gone further; text may lag behind them,
    while it could still become a stop string. text_offsets: where each token begins in the choice's generated text.
    finish_reason is set in exactly the last piece.
    stop_reason: the stop string or the requested stop token that ended the text, None for the model's own end.
    """

    index: int
    text: str
    token_ids: list[int]
    text_offsets: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None


class Choice:
    """One text in the making. num_tokens counts what the client is charged for, stop tokens included."""

    def __init__(self, index: int, submit: Submit, detokenizer: Detokenizer, timer: RequestTimer) -> None:
        self.index = index
        self.submit = submit
        self.num_tokens = 0
        self.cached_tokens = 0
        self._detokenizer = detokenizer
        self._timer = timer

    async def pieces(self, engine: Engine) -> AsyncGenerator[Piece, None]:
        """The choice's pieces as they come. Closing it, or a stop string, aborts the engine's request."""
        reason = "abort"
        try:
            async with aclosing(engine.generate(self.submit)) as deltas:
                async for delta in deltas:
                    piece = self._take(delta)
                    self._timer.tokens(len(piece.token_ids))
                    if piece.finish_reason is not None:
                        reason = piece.finish_reason
                        yield piece
                        return
                    yield piece
            raise EngineError("the engine ended the request without saying why")
        except EngineError:
            reason = "error"
            raise
        finally:
            self._timer.finish(reason)

    def _take(self, delta: Delta) -> Piece:
        if delta.finish_reason == "error":
            raise EngineError(delta.error or "the engine failed on this request")
        if delta.finish_reason == "abort":
            raise EngineError("the request was aborted: the server is shutting down")
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        ended_by_token = delta.finish_reason == "stop" and delta.stop_token_id is not None
        update = self._detokenizer.push(delta.token_ids, ends_with_stop_token=ended_by_token)
        num_kept = update.num_tokens - self.num_tokens
        piece = Piece(
            index=self.index,
            text=update.text,
            token_ids=delta.token_ids[:num_kept],
            text_offsets=update.offsets,
            logprobs=None if delta.logprobs is None else delta.logprobs[:num_kept],
            prompt_logprobs=delta.prompt_logprobs,
        )
        if update.stop is not None:
            piece.finish_reason, piece.stop_reason = "stop", update.stop
        elif delta.finish_reason is not None:
            piece.text += self._detokenizer.finish()
            piece.finish_reason = delta.finish_reason
            if self._detokenizer.stop is not None:
                piece.finish_reason, piece.stop_reason = "stop", self._detokenizer.stop
            elif delta.stop_token_id in self.submit.params.stop_token_ids:
                piece.stop_reason = delta.stop_token_id
        self.num_tokens = update.num_tokens
        return piece


async def run(engine: Engine, choices: Sequence[Choice]) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices as they come. The first failure ends all of them."""
    if len(choices) == 1:
        async with aclosing(choices[0].pieces(engine)) as pieces:
            async for piece in pieces:
                yield piece
        return
    # Each put waits for its take, so that a slow client holds up nothing but its own choices.
    arrived: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(maxsize=len(choices))

    async def forward(choice: Choice) -> None:
        try:
            async with aclosing(choice.pieces(engine)) as pieces:
                async for piece in pieces:
                    await arrived.put(piece)
        except Exception as error:
            await arrived.put(error)
        else:
            await arrived.put(None)

    tasks = [asyncio.create_task(forward(choice)) for choice in choices]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
