"""Reading side of the store: lists for operators, heartbeats, history. Never KEYS, always paged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from inference.keys import CLASS_SPAN, PRIORITIES, Keys
from inference.messages import (
    Ending,
    PoolBeat,
    ServerBeat,
    WorkerBeat,
    decode_ending,
    decode_pool_beat,
    decode_server_beat,
    decode_worker_beat,
)
from inference.redisio import Commander, Script
from inference.store.records import FIELDS, Page, RequestView, view_from

VIEW = Script(Path(__file__).parent / "lua" / "view.lua")


class StoreViews:
    """Queries over live requests and processes; each costs a fixed number of round trips."""

    def __init__(self, commander: Commander, keys: Keys) -> None:
        self.redis = commander
        self.keys = keys

    async def workers(self) -> list[WorkerBeat]:
        """Workers with a heartbeat."""
        return [decode_worker_beat(b) for b in await self._beats(self.keys.workers, self.keys.worker_beat)]

    async def servers(self) -> list[ServerBeat]:
        """Servers with a heartbeat."""
        return [decode_server_beat(b) for b in await self._beats(self.keys.servers, self.keys.server_beat)]

    async def pools(self) -> list[PoolBeat]:
        """Pool supervisors with a heartbeat."""
        return [decode_pool_beat(b) for b in await self._beats(self.keys.pools, self.keys.pool_beat)]

    async def alive(self, kind: str) -> tuple[set[str], set[str]]:
        """(alive, dead) ids of ``servers``, ``workers`` or ``pools``."""
        index = getattr(self.keys, kind)
        beat = {"servers": self.keys.server_beat, "workers": self.keys.worker_beat, "pools": self.keys.pool_beat}[kind]
        ids = sorted(m.decode() for m in await self.redis.call("SMEMBERS", index))
        if not ids:
            return set(), set()
        values = await self.redis.call("MGET", *(beat(i) for i in ids))
        alive = {i for i, v in zip(ids, values, strict=True) if v is not None}
        return alive, set(ids) - alive

    async def beat_ages(self, kind: Literal["workers", "servers", "pools"], ttl: float) -> dict[str, float]:
        """Seconds since the last beat, by id; ``ttl`` is what beats are kept for, seconds."""
        beat = {"servers": self.keys.server_beat, "workers": self.keys.worker_beat, "pools": self.keys.pool_beat}[kind]
        ids = sorted(m.decode() for m in await self.redis.call("SMEMBERS", getattr(self.keys, kind)))
        left = await asyncio.gather(*(self.redis.call("PTTL", beat(i)) for i in ids))
        return {i: max(0.0, ttl - ms / 1000) for i, ms in zip(ids, left, strict=True) if ms >= 0}

    async def count(self) -> int:
        """Live requests."""
        return int(await self.redis.call("ZCARD", self.keys.live))

    async def queue_depth(self, model: str) -> int:
        return int(await self.redis.call("ZCARD", self.keys.queue(model)))

    async def queued_by_priority(self, model: str) -> dict[str, int]:
        """Waiting requests per class; those that a lost worker left count with their class."""
        half = CLASS_SPAN // 2
        counts = await asyncio.gather(
            *(
                self.redis.call(
                    "ZCOUNT", self.keys.queue(model), n * CLASS_SPAN - half, f"({(n + 1) * CLASS_SPAN - half}"
                )
                for n in PRIORITIES.values()
            )
        )
        return {name: int(count) for name, count in zip(PRIORITIES, counts, strict=True)}

    async def running(self, model: str) -> int:
        """Requests that workers hold."""
        return int(await self.redis.call("SCARD", self.keys.running(model)))

    async def detached(self) -> int:
        """Resumable requests without a reader."""
        return int(await self.redis.call("ZCARD", self.keys.detached))

    async def oldest_age(self) -> float:
        """Age of the oldest live request, seconds; 0 where there is none."""
        first, clock = await asyncio.gather(
            self.redis.call("ZRANGE", self.keys.live, 0, 0, "WITHSCORES"), self.redis.call("TIME")
        )
        if not first:
            return 0.0
        return max(0.0, int(clock[0]) + int(clock[1]) / 1e6 - float(first[1]) / 1000)

    async def restarts(self) -> int:
        """Workers that pools have replaced since the store was created, pools that are gone included."""
        return int(await self.redis.call("HGET", self.keys.restarts, "total") or 0)

    async def position(self, model: str, request_id: str) -> int | None:
        """Place in the queue, 0 first; ``None`` where it is not queued."""
        rank = await self.redis.call("ZRANK", self.keys.queue(model), request_id)
        return None if rank is None else int(rank)

    async def page(self, offset: int = 0, limit: int = 100, *, newest_first: bool = True) -> Page:
        """A page of live requests by age: one command, whatever ``limit``.

        Redis serves nobody else while it collects them (some 10 us each): keep ``limit`` at some hundred.
        """
        return await self._read("newest" if newest_first else "oldest", offset, limit)

    async def view(self, request_id: str) -> RequestView | None:
        found = await self.views([request_id])
        return found[0] if found else None

    async def views(self, ids: list[str]) -> list[RequestView]:
        """Views of those ids that are alive, in order."""
        return (await self._read("ids", 0, 0, ids)).items if ids else []

    async def _read(self, order: Literal["newest", "oldest", "ids"], offset: int, limit: int, ids: Any = ()) -> Page:
        args = [self.keys.prefix, order, offset, limit, len(FIELDS), *FIELDS, *ids]
        total, now_ms, *rows = await self.redis.script(VIEW, [self.keys.live], args)
        return Page(int(total), [view_from(*row) for row in rows], int(now_ms))

    async def history(self, limit: int = 100) -> list[Ending]:
        """Latest endings, newest first."""
        return [decode_ending(e) for e in await self.redis.call("LRANGE", self.keys.history, 0, limit - 1)]

    async def outcomes(self) -> dict[str, int]:
        """Endings since the store was created, by ``state:reason``."""
        counts: dict[bytes, bytes] = await self.redis.call("HGETALL", self.keys.outcomes)
        return {k.decode(): int(v) for k, v in counts.items()}

    async def _beats(self, index: str, beat: Any) -> list[bytes]:
        ids = sorted(m.decode() for m in await self.redis.call("SMEMBERS", index))
        if not ids:
            return []
        return [v for v in await self.redis.call("MGET", *(beat(i) for i in ids)) if v is not None]
