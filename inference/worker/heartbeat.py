"""What a worker says of itself, and how often."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from inference import metrics
from inference.config import Config, host_name
from inference.engine.base import Engine
from inference.errors import EngineDied, SluiceError, StoreUnavailable
from inference.messages import EngineStats, ModelInfo, WorkerBeat, encode
from inference.store import RequestStore
from inference.text import TokenBytes
from inference.ticks import next_tick
from inference.version import VERSION
from inference.worker.usage import device_bytes, resident_bytes

logger = logging.getLogger("sluice.worker")


class Served:
    """One model of this worker."""

    __slots__ = ("engine", "info", "steps", "tokenizer")

    def __init__(self, engine: Engine, info: ModelInfo, tokenizer: TokenBytes | None) -> None:
        self.steps = metrics.StepClock(info.alias)
        self.engine = engine
        self.info = info
        self.tokenizer = tokenizer


def total_stats(models: Mapping[str, Served]) -> EngineStats:
    """What the engines of one worker do, added up."""
    each = [m.engine.stats() for m in models.values()]
    if len(each) == 1:
        return each[0]
    total = {f: sum(getattr(s, f) for s in each) for f in EngineStats.__struct_fields__}
    return msgspec.convert(total, EngineStats)


class Identity(NamedTuple):
    """What stays the same of a worker as long as it lives."""

    id: str
    pool: str
    device: str
    aliases: list[str]
    restarts: int
    started_ms: int

    def beat(self, state: str, models: Mapping[str, Served], held: int) -> WorkerBeat:
        """A heartbeat. Before any model is loaded it names those to come."""
        infos = [m.info for m in models.values()] or [ModelInfo(a, "", 0, 0, 0) for a in self.aliases]
        return WorkerBeat(
            id=self.id,
            pool=self.pool,
            host=host_name(),
            pid=os.getpid(),
            device=self.device,
            state=state,  # type: ignore[arg-type]
            models=infos,
            stats=total_stats(models),
            started_ms=self.started_ms,
            version=VERSION,
            restarts=self.restarts,
            held=held,
            rss_bytes=resident_bytes(),
            device_bytes=device_bytes(),
        )


class Heartbeat:
    """Tells the supervisor and Redis, once per ``heartbeat_interval``, that this worker lives.

    Args:
        describe: the heartbeat of this moment.
        on_beat: tells the supervisor.
        loosely: starts a task that nobody waits for.
    """

    def __init__(
        self,
        store: RequestStore,
        config: Config,
        describe: Callable[[], WorkerBeat],
        on_beat: Callable[[], None],
        loosely: Callable[[object], asyncio.Task[None]],
    ) -> None:
        self._store = store
        self._config = config
        self._describe = describe
        self._on_beat = on_beat
        self._loosely = loosely

    async def run(self) -> None:
        """Beat until cancelled.

        Raises:
            EngineDied: sequences run, and none has made a step for ``stall_timeout``.
        """
        limit = self._config.stall_timeout
        steps, moved = -1, time.monotonic()
        sending: asyncio.Task[None] | None = None
        while True:
            stats = self._describe().stats
            if stats.steps != steps or not stats.running:
                steps, moved = stats.steps, time.monotonic()
            elif time.monotonic() - moved > limit:
                raise EngineDied(f"no engine step for {limit:.0f} s with {stats.running} running")
            # The supervisor hears that this loop turns, whether or not Redis answers meanwhile.
            self._on_beat()
            if sending is None or sending.done():
                sending = self._loosely(self.try_to_send())
            await next_tick(self._config.heartbeat_interval)

    async def try_to_send(self) -> None:
        """One heartbeat now; where Redis does not answer, the next one says it."""
        try:
            await self.send()
        except StoreUnavailable:
            logger.debug("no heartbeat: Redis does not answer")
        except SluiceError:
            logger.exception("no heartbeat", extra={"event": "beat_failed"})

    async def send(self) -> None:
        """One heartbeat to Redis, now.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        k, beat, redis = self._store.keys, self._describe(), self._store.redis
        await asyncio.gather(
            redis.call("SET", k.worker_beat(beat.id), encode(beat), "PX", round(self._config.heartbeat_ttl * 1000)),
            redis.call("SADD", k.workers, beat.id),
        )

    async def withdraw(self, worker: str) -> None:
        """Take back the last one: the worker leaves.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        k, redis = self._store.keys, self._store.redis
        await redis.call("DEL", k.worker_beat(worker))
        if not await redis.call("EXISTS", k.of_worker(worker)):
            await redis.call("SREM", k.workers, worker)
