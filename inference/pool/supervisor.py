"""The supervisor: keeps N workers alive, and puts the requests of the dead back at once."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable

from inference import metrics
from inference.background import Background
from inference.config import Config, host_name
from inference.endings import log_ending
from inference.errors import ConfigError, SluiceError, StoreUnavailable
from inference.messages import Ending, PoolBeat, encode
from inference.pool.child import Child
from inference.reaper import Reaper
from inference.redisio import Commander, connect
from inference.store import RequestStore, StoreViews
from inference.ticks import next_tick, until_tick
from inference.version import VERSION
from inference.worker import MISCONFIGURED, RETIRED

logger = logging.getLogger("sluice.pool")

_FIRST_BACKOFF = 0.2
_LAST_BACKOFF = 30.0
_STABLE_AFTER = 60.0
_BREAKER = 5
"""Failed starts in a row after which a pool calls itself broken (and tries on, slowly)."""


class Supervisor:
    """One pool. :meth:`run` returns when it has drained (after :meth:`drain`).

    A worker that falls silent for ``heartbeat_ttl`` after it was ready is
    frozen and gets killed; one that computes is not, since it beats from its
    event loop while torch runs in another thread.
    """

    def __init__(
        self,
        config: Config,
        devices: list[str],
        *,
        models: list[str],
        on_ending: Callable[[Ending], None] | None = None,
    ) -> None:
        self.id = f"p-{secrets.token_hex(4)}"
        self.config = config
        self._slots = [d for d in devices for _ in range(config.workers_per_device)]
        self._models = models
        metrics.know(models)
        self._children: dict[int, Child] = {}
        self._draining = False
        self._misconfigured: ConfigError | None = None
        self._retired = 0
        """Places of workers that operators have drained; they stay empty as long as the pool lives."""
        self._started_ms = int(time.time() * 1000)
        self._failures = 0
        self.restarts = 0
        self._told = 0
        """How many of these the store is known to have counted."""
        self._stop = asyncio.Event()
        dial = lambda: connect(config.redis_url, timeout=config.redis_timeout, client_name=f"sluice-{self.id}")  # noqa: E731
        self.redis = Commander(dial, name=self.id)
        self.store = RequestStore(self.redis, config)
        self.views = StoreViews(self.redis, self.store.keys)
        self._on_ending = on_ending or metrics.ended
        self._reaper = Reaper(self.store, self.views, self._ended)

    def _ended(self, ending: Ending) -> None:
        log_ending(ending)
        self._on_ending(ending)

    async def run(self) -> int:
        """Start the workers and keep them until drained. Gives an exit status.

        Raises:
            ConfigError: a worker cannot even start as it is configured. All have ended by then.
        """
        self.redis.start()
        await self.redis.call("PING")
        await self._beat()
        self._reaper.start()
        beats = Background("pool-beats", self._beats)
        beats.start()
        keepers = [asyncio.create_task(self._keep(i), name=f"keep-{i}") for i in range(len(self._slots))]
        await asyncio.gather(*keepers)
        await beats.stop()
        await self._reaper.stop()
        await self._leave()
        await self.redis.stop()
        if self._misconfigured is not None:
            raise self._misconfigured
        return 0

    def drain(self) -> None:
        """Stop: workers finish or hand back what they hold. A second call makes them hand back now."""
        if not self._draining:
            logger.info("the pool drains", extra={"event": "pool_drain"})
        self._draining = True
        self._stop.set()
        for child in self._children.values():
            # One that still loads its model holds no request, and could not answer before it has loaded.
            child.send(signal.SIGTERM if child.ready.is_set() else signal.SIGKILL)

    # -- one slot ------------------------------------------------------------------------------------

    async def _keep(self, slot: int) -> None:
        backoff = _FIRST_BACKOFF
        restarts = 0
        while not self._draining:
            child = Child(
                f"w-{secrets.token_hex(5)}", self._slots[slot], self.config,
                pool=self.id, models=self._models, restarts=restarts,
            )  # fmt: skip
            self._children[slot] = child
            await child.spawn()
            if self._leaving():
                child.send(signal.SIGKILL)
            status = await self._watch(child)
            del self._children[slot]  # the slot is idle until the next one starts, however long that takes
            await self._bury(child.id)
            if self._leaving():
                break
            if status == MISCONFIGURED and not restarts:
                # Only the first: what served once does so again, when a device or a file is back.
                self._misconfigured = ConfigError(
                    f"a worker on {child.device} cannot start as it is configured (the reason stands above)"
                )
                self.drain()
                break
            if status == RETIRED:
                self._retired += 1
                logger.info("worker %s was drained for good", child.id, extra={"event": "worker_retired"})
                await self._stop.wait()
                break
            stable = child.ready.is_set() and time.monotonic() - child.started > _STABLE_AFTER
            self._failures = 0 if child.ready.is_set() else self._failures + 1
            restarts += 1
            self.restarts += 1
            await self._tell()
            backoff = _FIRST_BACKOFF if stable or status == 0 else backoff
            logger.log(
                logging.ERROR if status else logging.INFO,
                "worker %s on %s ended %s; starting another in %.1f s",
                child.id, child.device, f"with status {status}" if status else "as it was told", backoff,
                extra={"event": "worker_died" if status else "worker_ended", "worker": child.id, "status": status},
            )  # fmt: skip
            await self._pause(backoff)
            backoff = min(backoff * 2, _LAST_BACKOFF)

    def _leaving(self) -> bool:
        # A signal may have come during any await.
        return self._draining

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    async def _watch(self, child: Child) -> int:
        """Wait for the end of a worker; kill it where it is frozen or does not get ready."""
        ended = asyncio.create_task(child.wait())
        frozen_after = self.config.heartbeat_ttl + self.config.heartbeat_interval
        drain_began: float | None = None
        while True:
            done, _ = await asyncio.wait([ended], timeout=until_tick(min(1.0, self.config.heartbeat_interval)))
            if done:
                return ended.result()
            if self._draining and drain_began is None:
                drain_began = time.monotonic()
            waited = time.monotonic() - child.started
            reason = ""
            if child.ready.is_set() and child.silent_for() > frozen_after:
                reason = f"silent for {child.silent_for():.1f} s"
            elif not child.ready.is_set() and waited > self.config.start_timeout:
                reason = f"not ready after {waited:.0f} s"
            elif drain_began is not None and time.monotonic() - drain_began > self.config.drain_timeout + 10.0:
                reason = "not drained in time"
            if reason:
                logger.error("worker %s is %s; killing it", child.id, reason, extra={"event": "worker_killed"})
                child.send(signal.SIGKILL)

    async def _bury(self, worker: str) -> None:
        """Its requests go back to the queue at once, not after a heartbeat's TTL."""
        k = self.store.keys
        for _ in range(20):
            try:
                async with asyncio.timeout(2.0 if self._draining else None):
                    await self.redis.call("DEL", k.worker_beat(worker))
                    await self._reaper.dead_worker(worker, certain=True)
                return
            except (StoreUnavailable, TimeoutError):
                if self._leaving():
                    return  # whoever reaps elsewhere finds that it has no heartbeat
                await asyncio.sleep(0.25)

    # -- the pool's own heartbeat ----------------------------------------------------------------------

    async def _beats(self) -> None:
        while True:
            try:
                await self._beat()
            except StoreUnavailable:
                logger.debug("no heartbeat: Redis does not answer")
            except SluiceError:
                logger.exception("no heartbeat", extra={"event": "beat_failed"})
            await next_tick(self.config.heartbeat_interval)

    async def _tell(self) -> None:
        """Have the restarts counted where they outlive this pool; what fails now is made up for by the next beat."""
        count = self.restarts
        if count > self._told:
            try:
                await self.store.count_restarts(self.id, count, self._told)
                self._told = count
            except StoreUnavailable:
                logger.debug("restarts not counted: Redis does not answer")

    async def _beat(self) -> None:
        k = self.store.keys
        children = self._children.values()
        idle_slots = len(self._slots) - len(self._children) - self._retired
        starting = [c.id for c in children if not c.ready.is_set()] + ["-"] * idle_slots
        beat = PoolBeat(
            id=self.id,
            host=host_name(),
            pid=os.getpid(),
            workers=[c.id for c in children if c.ready.is_set()],
            starting=starting,
            models=self._models,
            restarts=self.restarts,
            started_ms=self._started_ms,
            version=VERSION,
            draining=self._draining,
            broken=self._failures >= _BREAKER,
            retired=self._retired,
        )
        await asyncio.gather(
            self.redis.call("SET", k.pool_beat(self.id), encode(beat), "PX", round(self.config.heartbeat_ttl * 1000)),
            self.redis.call("SADD", k.pools, self.id),
        )
        await self._tell()

    async def _leave(self) -> None:
        k = self.store.keys
        try:
            async with asyncio.timeout(2.0):
                await asyncio.gather(
                    self.redis.call("DEL", k.pool_beat(self.id)), self.redis.call("SREM", k.pools, self.id)
                )
        except (StoreUnavailable, TimeoutError):
            logger.info("leaving without a word: Redis does not answer")
