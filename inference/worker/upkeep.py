"""What a worker mends beside its work: requests lost on the way, and those whose reader is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from inference import metrics
from inference.endings import log_ending
from inference.errors import StoreUnavailable
from inference.lifecycle import Outcome, Reason
from inference.messages import Ending
from inference.store import RequestStore
from inference.ticks import next_tick

logger = logging.getLogger("sluice.worker")


class Upkeep:
    """Compares what a worker holds with what Redis says it holds, and ends what nobody reads.

    Args:
        held: ids that the worker has in its engines.
        unsent: ids with frames on their way to Redis.
        abort: lets go of a request that is this worker's no longer.
    """

    def __init__(
        self,
        store: RequestStore,
        worker: str,
        *,
        interval: float,
        held: Callable[[], Collection[str]],
        unsent: Callable[[], set[str]],
        abort: Callable[[str], None],
    ) -> None:
        self._store = store
        self._worker = worker
        self._interval = interval
        self._held = held
        self._unsent = unsent
        self._abort = abort
        self._suspects: set[str] = set()
        self.strays = 0
        """Requests found that named this worker without its knowing: none, unless replies were lost."""

    async def run(self) -> None:
        """Once per ``interval``: what is held and no longer ours, and what is ours and not held."""
        while True:
            await next_tick(self._interval)
            ids = list(self._held())
            try:
                lengths = await self._store.held(ids, "worker", self._worker)
                await self._find_strays()
                for ending in await self._store.recover():
                    _count(ending)
            except StoreUnavailable:
                continue
            for request_id, length in zip(ids, lengths, strict=True):
                if length < 0:
                    self._abort(request_id)

    async def _find_strays(self) -> None:
        """Requests that name this worker, twice in a row, although it does not hold them.

        The reply to their claim was lost, or a claim reached Redis long after its
        connection was given up. They go back to the queue.
        """
        named = await self._store.redis.call("SMEMBERS", self._store.keys.of_worker(self._worker))
        found = {m.decode() for m in named} - set(self._held()) - self._unsent()
        for request_id in found & self._suspects:
            self.strays += 1
            logger.warning(
                "request %s was never received: back to the queue",
                request_id,
                extra={"event": "stray_claim", "request_id": request_id},
            )
            await self.unclaim(request_id)
        self._suspects = found

    async def unclaim(self, request_id: str) -> None:
        """Put a request back into the queue, where Redis answers; else the periodic check tries again."""
        try:
            await self._store.requeue(request_id, worker=self._worker, lost=False)
        except StoreUnavailable:
            logger.warning("request %s could not be handed back", request_id, extra={"request_id": request_id})

    async def settle_detached(self, request_id: str) -> None:
        """Its last frame is logged and nobody reads it: end it here, keeping the log for its time."""
        try:
            finish = await self._store.redis.call("HGET", self._store.keys.request(request_id), "finish")
            if finish is None:
                return
            word = finish.decode()
            done = word in ("stop", "length")
            outcome = Outcome.finished(word) if done else Outcome.failed(Reason.ENGINE_ERROR)
            _count(await self._store.settle(request_id, outcome, guard=("server", "")))
        except StoreUnavailable:
            logger.info("request %s is left to the reaper", request_id, extra={"request_id": request_id})


def _count(ending: Ending | None) -> None:
    if ending is not None:
        log_ending(ending)
        metrics.ended(ending)
