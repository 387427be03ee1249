"""Tasks that last as long as their owner, and that nothing waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("sluice.background")

PAUSE = 1.0
"""Seconds from a failure to the next beginning."""


class Background:
    """One such task: begun, begun again whenever it fails, and stopped."""

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancel it and wait for its end. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
                return
            except Exception:
                if self._task is None:
                    return  # it was stopped; that is how what it was doing took it
                # The edge of the task: those who depend on it, most often all requests of this process, would
                # never learn that it has ended.
                logger.exception("%s has failed and begins again", self._name, extra={"event": "task_failed"})
            await asyncio.sleep(PAUSE)
