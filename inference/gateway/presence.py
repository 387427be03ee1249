"""What a server knows of the other processes, refreshed once a second, and what it says of itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from inference.background import Background
from inference.errors import SluiceError, StoreUnavailable
from inference.messages import ModelInfo, PoolBeat, ServerBeat, WorkerBeat, encode
from inference.store.store import RequestStore
from inference.store.views import StoreViews
from inference.ticks import next_tick

logger = logging.getLogger("sluice.presence")


class Presence:
    """Beats for one server and keeps a view of workers and pools."""

    def __init__(self, store: RequestStore, views: StoreViews, server: str, beat: Callable[[], ServerBeat]) -> None:
        self._store = store
        self._views = views
        self._server = server
        self._beat = beat
        self._task = Background("presence", self._run)
        self._refreshed = asyncio.Event()
        self.workers: list[WorkerBeat] = []
        self.pools: list[PoolBeat] = []
        self._unserved: dict[str, float] = {}

    def start(self) -> None:
        self._task.start()

    async def wait_refreshed(self) -> None:
        """Until the view is one that began after this call."""
        self._refreshed.clear()
        await self._refreshed.wait()

    async def stop(self) -> None:
        await self._task.stop()

    async def remove(self) -> None:
        """Take this server out of the index, once nothing names it any more."""
        k = self._store.keys
        await self._store.redis.call("DEL", k.server_beat(self._server))
        if not await self._store.redis.call("EXISTS", k.of_server(self._server)):
            await self._store.redis.call("SREM", k.servers, self._server)

    async def beat(self) -> None:
        k, config = self._store.keys, self._store.config
        await asyncio.gather(
            self._store.redis.call(
                "SET", k.server_beat(self._server), encode(self._beat()), "PX", round(config.heartbeat_ttl * 1000)
            ),
            self._store.redis.call("SADD", k.servers, self._server),
        )

    async def _run(self) -> None:
        interval = self._store.config.heartbeat_interval
        while True:
            try:
                _, workers, pools = await asyncio.gather(self.beat(), self._views.workers(), self._views.pools())
                self.workers, self.pools = workers, pools
                self._refreshed.set()
            except StoreUnavailable:
                logger.debug("no heartbeat: Redis does not answer", extra={"event": "beat_missed"})
            except SluiceError:
                logger.exception("no heartbeat", extra={"event": "beat_failed"})
            # A shorter wait while nothing serves: a client waits for the first worker.
            await next_tick(interval if self.workers else interval / 4)

    def models(self) -> dict[str, ModelInfo]:
        """What is really being served, by alias: limits of the weakest worker, slots of all."""
        served: dict[str, ModelInfo] = {}
        for worker in self.workers:
            if worker.state != "ready":
                continue
            for info in worker.models:
                known = served.get(info.alias)
                if known is None:
                    served[info.alias] = info
                else:
                    served[info.alias] = ModelInfo(
                        alias=info.alias,
                        engine=info.engine,
                        context_length=min(known.context_length, info.context_length),
                        capacity_tokens=min(known.capacity_tokens, info.capacity_tokens),
                        slots=known.slots + info.slots,
                        kind=info.kind,
                        dimensions=min(known.dimensions, info.dimensions),
                        suggested=known.suggested or info.suggested,
                    )
        return served

    def coming(self, alias: str) -> bool:
        return is_coming(alias, self.workers, self.pools)

    def unserved_for(self, alias: str) -> float:
        """Seconds for which no worker has had the alias, quiet or draining ones included, and none was coming."""
        has = any(w.state != "starting" and alias in (m.alias for m in w.models) for w in self.workers)
        if has or self.coming(alias):
            self._unserved.pop(alias, None)
            return 0.0
        now = time.monotonic()
        return now - self._unserved.setdefault(alias, now)

    def tokens_per_second(self, alias: str) -> float:
        """Measured decode rate of all workers of an alias, tokens per second; 0 where unknown."""
        rate = 0.0
        for worker in self.workers:
            if any(m.alias == alias for m in worker.models) and worker.stats.step_seconds > 0:
                rate += worker.stats.generated_tokens / worker.stats.step_seconds
        return rate


def is_coming(alias: str, workers: list[WorkerBeat], pools: list[PoolBeat]) -> bool:
    """Whether a pool is bringing up a worker for the alias (one that keeps failing does not count)."""
    broken = {p.id for p in pools if p.broken}
    return any(alias in p.models and p.starting and not p.draining and not p.broken for p in pools) or any(
        w.state == "starting" and w.pool not in broken and alias in (m.alias for m in w.models) for w in workers
    )
