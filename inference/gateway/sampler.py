"""Samples the load once per period for the charts of the last hour. One runs in every server, without a leader."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from inference.background import Background
from inference.errors import SluiceError, StoreUnavailable
from inference.messages import WorkerBeat
from inference.store.series import Series

logger = logging.getLogger("sluice.sampler")


class Sampler:
    """Measures what the workers have generated since the last look; the store decides whose sample counts."""

    def __init__(self, series: Series, workers: Callable[[], Sequence[WorkerBeat]]) -> None:
        self._series = series
        self._workers = workers
        self._seen: dict[str, int] = {}
        self._looked = 0.0
        self._task = Background("sampler", self._run)

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    def measure(self, now: float) -> tuple[float, int]:
        """(tokens per second since the last call, requests running) of all workers; ``now``: a monotonic clock.

        A worker seen for the first time counts from the next look on.
        """
        workers = self._workers()
        tokens = {w.id: w.stats.generated_tokens for w in workers}
        fresh = sum(max(0, n - self._seen[i]) for i, n in tokens.items() if i in self._seen)
        elapsed = now - self._looked if self._looked else 0.0
        self._seen, self._looked = tokens, now
        return fresh / elapsed if elapsed > 0 else 0.0, sum(w.stats.running for w in workers)

    async def _run(self) -> None:
        while True:
            try:
                await self._series.sample(*self.measure(time.monotonic()))
            except StoreUnavailable:
                logger.debug("no sample: Redis does not answer")
            except SluiceError:
                logger.exception("no sample", extra={"event": "sample_failed"})
            await asyncio.sleep(self._series.period)
