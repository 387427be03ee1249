"""What a reader waits on while no frame has come."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes one waiting reader; rung while nobody waits, it is heard by the next. Cheaper than an Event."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._rung = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def silence(self) -> None:
        self._rung = False

    async def heard(self) -> None:
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
