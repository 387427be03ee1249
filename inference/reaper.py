"""The reaper: ends or re-queues the requests of processes that died, and repairs indexes.

One runs in every server and every pool. There is no leader: each step is a
script with a guard, so that doing it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from inference import metrics
from inference.background import Background
from inference.errors import SluiceError, StoreUnavailable
from inference.lifecycle import Outcome, Reason
from inference.messages import Ending
from inference.store.store import RequestStore
from inference.store.views import StoreViews
from inference.ticks import next_tick

logger = logging.getLogger("sluice.reaper")

_REPAIR_PAGE = 200


class Reaper:
    """Reaps once per ``reap_interval``; ``reaped`` counts by kind."""

    def __init__(self, store: RequestStore, views: StoreViews, on_ending: Callable[[Ending], None]) -> None:
        self._store = store
        self._views = views
        self._on_ending = on_ending
        self._task = Background("reaper", self._run)
        self._cursor = 0
        self._trust_from = 0.0
        """``time.monotonic()`` from which missing heartbeats mean death again; see :meth:`_judge`."""
        self.reaped: Counter[str] = Counter()

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    async def _run(self) -> None:
        while True:
            try:
                await self.reap()
            except StoreUnavailable:
                self._distrust()
                logger.debug("not reaping: Redis does not answer")
            except SluiceError:
                logger.exception("a round of the reaper failed", extra={"event": "reap_failed"})
            await next_tick(self._store.config.reap_interval)

    async def reap(self) -> None:
        """One round."""
        # What can be asked together goes in one round trip: this runs every second, in every process.
        (_, dead_servers), (_, dead_workers), (_, dead_pools), now = await asyncio.gather(
            self._views.alive("servers"),
            self._views.alive("workers"),
            self._views.alive("pools"),
            self._store.now_ms(),
        )
        if self._judge():
            for server in dead_servers:
                await self.dead_server(server)
            for worker in dead_workers:
                await self.dead_worker(worker)
            for pool in dead_pools:
                await self._store.redis.call("SREM", self._store.keys.pools, pool)
        k, redis, end = self._store.keys, self._store.redis, self._cursor + _REPAIR_PAGE - 1
        late, left, page = await asyncio.gather(
            redis.call("ZRANGEBYSCORE", k.deadlines, "-inf", now, "LIMIT", 0, _REPAIR_PAGE),
            redis.call("ZRANGEBYSCORE", k.detached, "-inf", now, "LIMIT", 0, _REPAIR_PAGE),
            redis.call("ZRANGE", k.live, self._cursor, end),
        )
        await self._expired(late, left)
        await self._repair([m.decode() for m in page])
        for ending in await self._store.recover():
            self._on_ending(ending)

    def _judge(self) -> bool:
        """Whether a missing heartbeat means a dead process.

        While Redis is away or stands still, nobody can beat and every heartbeat
        expires. So after such a time the living get one TTL to beat again.
        """
        config = self._store.config
        slack = config.heartbeat_ttl - config.heartbeat_interval - config.reap_interval
        if self._store.redis.take_longest() > max(slack, 0.1):
            self._distrust()
        return time.monotonic() >= self._trust_from

    def _distrust(self) -> None:
        self._trust_from = time.monotonic() + self._store.config.heartbeat_ttl

    async def dead_server(self, server: str) -> None:
        """Detach its resumable requests for their grace time, cancel the others."""
        k, redis = self._store.keys, self._store.redis
        ids = [m.decode() for m in await redis.call("SMEMBERS", k.of_server(server))]
        for request_id in ids:
            word, finish = await self._store.detach(request_id, server=server, grace=self._store.config.resume_grace)
            if word == "detached":
                self._count("server_detached", request_id)
            elif word in ("finished", "fixed"):
                done = finish in ("stop", "length")
                outcome = Outcome.finished(finish) if done else Outcome.cancelled(Reason.CLIENT_GONE)
                await self._settle("server", request_id, outcome, ("server", server))
        if not await redis.call("EXISTS", k.of_server(server)):
            await redis.call("SREM", k.servers, server)

    async def dead_worker(self, worker: str, *, certain: bool = False) -> None:
        """Put its requests back into the queue; fail those that have lost too many workers.

        ``certain``: it is known to have died, not only to have fallen silent.
        """
        k, redis = self._store.keys, self._store.redis
        for member in await redis.call("SMEMBERS", k.of_worker(worker)):
            request_id = member.decode()
            word = await self._store.requeue(request_id, worker=worker, lost=True, certain=certain)
            if word == "requeued":
                self._count("worker_requeued", request_id)
            elif word == "exhausted":
                await self._settle("worker", request_id, Outcome.failed(Reason.WORKER_LOST), ("worker", worker))
        if not await redis.call("EXISTS", k.of_worker(worker)):
            await redis.call("SREM", k.workers, worker)
            await redis.call("DEL", k.worker_beat(worker))

    async def _expired(self, late: list[bytes], left: list[bytes]) -> None:
        """End those past their deadline, and those without a reader past their grace time."""
        k, redis = self._store.keys, self._store.redis
        for member in late:
            await self._settle("deadline", member.decode(), Outcome.cancelled(Reason.DEADLINE), None)
        for member in left:
            request_id = member.decode()
            finish = (await redis.call("HGET", k.request(request_id), "finish") or b"").decode()
            done = finish in ("stop", "length")
            outcome = Outcome.finished(finish) if done else Outcome.cancelled(Reason.CLIENT_GONE)
            await self._settle("grace", request_id, outcome, ("server", ""))

    async def _repair(self, ids: list[str]) -> None:
        """A page of the live index per round: entries without a record go, records without an owner end."""
        k, redis = self._store.keys, self._store.redis
        self._cursor = self._cursor + len(ids) if len(ids) == _REPAIR_PAGE else 0
        if not ids:
            return
        (servers, _), (workers, _), *records = await asyncio.gather(
            self._views.alive("servers"),
            self._views.alive("workers"),
            *(redis.call("HMGET", k.request(i), "state", "server", "worker", "finish") for i in ids),
        )
        for request_id, values in zip(ids, records, strict=True):
            state, server, worker, finish = ((v or b"").decode() for v in values)
            if not state:
                await self._settle("index", request_id, Outcome.failed(Reason.STATE_LOST), None)
            elif server and server not in servers:
                await redis.call("SADD", k.of_server(server), request_id)
                await redis.call("SADD", k.servers, server)
            elif state == "running" and not finish and worker not in workers:
                await redis.call("SADD", k.of_worker(worker), request_id)
                await redis.call("SADD", k.workers, worker)

    async def _settle(self, kind: str, request_id: str, outcome: Outcome, guard: tuple[str, str] | None) -> None:
        ending = await self._store.settle(request_id, outcome, guard=guard)
        if ending is not None:
            self._count(kind, request_id)
            self._on_ending(ending)

    def _count(self, kind: str, request_id: str) -> None:
        self.reaped[kind] += 1
        metrics.reaped(kind)
        logger.warning("reaped %s (%s)", request_id, kind, extra={"event": "reaped", "request_id": request_id})
