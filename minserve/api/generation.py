"""The choices of a request, run on the engine: one, or several side by side.

Owns: the life of a choice on the engine, and the clock that measures it.
Does not know: where a text ends (text.output), HTTP, JSON shapes, chat or completions.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from minserve.api.auth import Caller
from minserve.api.engine import Engine
from minserve.api.in_flight import InFlight, Text
from minserve.errors import EngineError
from minserve.metrics import RequestTimer
from minserve.protocol import SparseUsage, Submit
from minserve.text.output import Output, Piece


class Choice:
    """One text that a request of the caller's asks for."""

    def __init__(
        self, submit: Submit, output: Output, timer: RequestTimer, caller: Caller, in_flight: InFlight
    ) -> None:
        self.submit = submit
        self.output = output
        self._timer = timer
        self._caller = caller
        self._in_flight = in_flight

    async def pieces(self, engine: Engine) -> AsyncGenerator[Piece, None]:
        """The choice's pieces as they come. Closing it, or a stop string, aborts the engine's request."""
        reason = "abort"
        self._in_flight.add(self._caller, Text(self.submit, self.output))
        try:
            async with aclosing(engine.generate(self.submit)) as deltas:
                async for delta in deltas:
                    piece = self.output.take(delta)
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
            self._in_flight.remove(self._caller, self.submit.request_id)
            self._timer.finish(reason)


def drafts_of(choices: Sequence[Choice]) -> tuple[int, int]:
    """(draft tokens that were verified, those that were right) for all choices together."""
    outputs = [choice.output for choice in choices]
    return sum(output.draft_tokens for output in outputs), sum(output.accepted_tokens for output in outputs)


def sparse_of(choices: Sequence[Choice]) -> SparseUsage | None:
    """What the working sets of the choices that were sparse did together, from the first token on that was computed by
    any of them; None if none was."""
    used = [choice.output.sparse for choice in choices if choice.output.sparse is not None]
    if not used:
        return None
    totals = {name: sum(getattr(one, name) for one in used) for name in SparseUsage.__struct_fields__}
    return SparseUsage(**totals | {"from_token": min(one.from_token for one in used)})


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
