"""Paces the starts of requests by iterations of the event loop."""

import asyncio
from collections import deque


class Turnstile:
    """Lets a few callers through in each iteration of the loop, in order, so that a burst of requests does not hold up
    running streams.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return in this iteration, or in a later one."""
        loop = asyncio.get_running_loop()
        if self._left == self._per_turn:
            loop.call_soon(self._turn, loop)
        if self._left:
            self._left -= 1
        else:
            self._waiting.append(future := loop.create_future())
            await future

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._per_turn
        while self._waiting and self._left:
            future = self._waiting.popleft()
            if not future.done():  # cancelled while it waited
                future.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            loop.call_soon(self._turn, loop)
