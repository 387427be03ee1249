"""What operators, health checks and clients may ask a gateway; changes nothing."""

from __future__ import annotations

import builtins
from typing import Literal

from inference.config import Config
from inference.gateway.presence import Presence
from inference.messages import Ending, Job, ModelInfo, PoolBeat, ServerBeat, WorkerBeat
from inference.redisio import Commander
from inference.store import AuditReport, Page, RequestStore, RequestView, StoreViews
from inference.store.series import AuditRun, Sample, Series, audit_and_remember


class Questions:
    """The reading side of :class:`~inference.gateway.Gateway`, which sets these parts up."""

    id: str
    config: Config
    redis: Commander
    store: RequestStore
    views: StoreViews
    presence: Presence
    _aliases: builtins.list[str]
    _series: Series
    _started: bool

    def models(self) -> dict[str, ModelInfo]:
        """Aliases that ready workers serve now, with their limits."""
        return self.presence.models()

    @property
    def healthy(self) -> bool:
        """Whether Redis answered last time it was asked."""
        return self._started and self.redis.down_since is None

    @property
    def aliases(self) -> list[str]:
        """Configured aliases, served or not, in order."""
        return list(self._aliases)

    async def retry_after(self, model: str) -> float:
        """Seconds until a full queue has probably moved on, from its length and the measured rate."""
        info = self.models().get(model)
        if info is None:
            return 5.0
        recent = [e for e in await self.views.history(50) if e.model == model and e.claimed_ms]
        if not recent:
            return 2.0
        served = sum(e.ended_ms - e.claimed_ms for e in recent) / len(recent) / 1000
        depth = await self.views.queue_depth(model)
        return min(120.0, max(1.0, served * (depth + 1) / max(1, info.slots)))

    async def view(self, request_id: str) -> RequestView | None:
        """A live request, or ``None``."""
        return await self.views.view(request_id)

    async def details(self, request_id: str) -> tuple[Job, builtins.list[tuple[int, str]]] | None:
        """The job of a live request and its claims, (ms, worker or nobody); ``None`` where it is not alive."""
        return await self.store.details(request_id)

    async def ending(self, request_id: str) -> Ending | None:
        """The summary of a resumable request that ended lately, or ``None``."""
        return await self.store.ending(request_id)

    async def list(self, offset: int = 0, limit: int = 100, *, newest_first: bool = True) -> Page:
        return await self.views.page(offset, limit, newest_first=newest_first)

    async def workers(self) -> builtins.list[WorkerBeat]:
        return await self.views.workers()

    async def servers(self) -> builtins.list[ServerBeat]:
        return await self.views.servers()

    async def pools(self) -> builtins.list[PoolBeat]:
        return await self.views.pools()

    async def history(self, limit: int = 100) -> builtins.list[Ending]:
        return await self.views.history(limit)

    async def outcomes(self) -> dict[str, int]:
        return await self.views.outcomes()

    async def beat_ages(self, kind: Literal["workers", "servers", "pools"]) -> dict[str, float]:
        """Seconds since each last beat, by id."""
        return await self.views.beat_ages(kind, self.config.heartbeat_ttl)

    async def load(self) -> builtins.list[Sample]:
        """Samples of the last hour, oldest first."""
        return await self._series.load()

    async def audit(self) -> AuditReport:
        """Compare all records, owners and indexes; the result is remembered for operators."""
        return await audit_and_remember(self.store, self.id)

    async def audits(self) -> builtins.list[AuditRun]:
        """The last audits that any server or ``manage.py inflight --audit`` ran, newest first."""
        return await self._series.audits()

    async def now_ms(self) -> int:
        return await self.store.now_ms()
