"""Back-pressure: what a handler's ``send`` waits on while its client's connection is full."""

from __future__ import annotations

import asyncio

from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer


@implementer(IPushProducer)
class WriteGate:
    """Shut by the transport while more than the high-water mark is unsent; open otherwise.

    Twisted calls ``pauseProducing`` when the buffer passes the mark and
    ``resumeProducing`` once it is empty. A lost connection opens the gate for good, so
    that nobody waits for a client that has gone.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._lost = False

    @property
    def shut(self) -> bool:
        return not self._open.is_set()

    def pauseProducing(self) -> None:
        if not self._lost:
            self._open.clear()

    def resumeProducing(self) -> None:
        self._open.set()

    def stopProducing(self) -> None:
        self._lost = True
        self._open.set()

    async def wait_open(self) -> None:
        await self._open.wait()
