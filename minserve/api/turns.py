"""Preparing what was let in, a piece at a time.

Owns: the order in which requests go on with what keeps the event loop busy.
Does not know: what they do there.

Hundreds may be let in within a moment, and each has a body to parse and a prompt to tokenize. Done as they come, that
would be all that the loop does for a while. So in each turn of the loop one of them goes on, and between two of them
the loop does whatever else there is to do: above all, it tells others soon that there is no room. While it has to,
there is a pause after each piece.
"""

import asyncio
from collections import deque
from collections.abc import Callable

PAUSE_S = 0.003
"""After a piece, while others are being refused: more than it takes, so that most of the time is theirs."""


class Turns:
    """Those who wait for their turn, first come, first served. refusing: whether others are being refused now."""

    def __init__(self, refusing: Callable[[], bool] = lambda: False) -> None:
        self._refusing = refusing
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        """Returns when it is one's turn to keep the loop busy until the next `await` that waits."""
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._end_with_the_turn()

    def _end_with_the_turn(self) -> None:
        self._taken = True
        loop = asyncio.get_running_loop()
        if self._refusing():
            loop.call_later(PAUSE_S, self._give)
        else:
            loop.call_soon(self._give)

    def _give(self) -> None:
        """A new turn of the loop: the next one's."""
        self._taken = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self._end_with_the_turn()
                return
