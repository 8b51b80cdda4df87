"""Preparing what was let in, a piece at a time.

Owns: the order in which requests go on with what keeps the event loop busy.
Does not know: what they do there.

Hundreds may be let in within a moment, and each has a body to parse and a prompt to tokenize. Done as they come, that
would be all that the loop does for a while. So in each turn of the loop one of them goes on, and between two of them
the loop does whatever else there is to do: above all, it tells others soon that there is no room.
"""

import asyncio
from collections import deque


class Turns:
    """Those who wait for their turn, first come, first served."""

    def __init__(self) -> None:
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
        asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        """A new turn of the loop: the next one's."""
        self._taken = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self._end_with_the_turn()
                return
