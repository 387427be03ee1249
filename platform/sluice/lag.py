"""How late the event loop runs: the figure that says whether something blocks it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from inference.ticks import until_tick

PERIOD = 0.25
"""Seconds; four looks a second are seldom enough to cost an idle server nothing that can be measured."""
WINDOW = 40


class LagSampler:
    """Asks the loop to wake it every ``PERIOD`` seconds and notes by how much it was late."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="lag-sampler")

    def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + (wait := until_tick(PERIOD))
            await asyncio.sleep(wait)
            self._samples.append(max(0.0, loop.time() - due))

    @property
    def last(self) -> float:
        """Seconds of the newest sample."""
        return self._samples[-1] if self._samples else 0.0

    @property
    def worst(self) -> float:
        """Seconds of the worst sample in the last ten seconds."""
        return max(self._samples, default=0.0)
