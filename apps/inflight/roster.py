"""The live requests as one server process sees them for its operators.

A plain page is read from the index by age: one command, however many requests
there are. A filter or another order needs all of them: they are read in chunks,
one command each, once for all pages open on this process, and no more than
about a tenth of the time is spent on it, so that streams go on undisturbed.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from typing import Literal, Protocol

from apps.inflight.query import PER_PAGE, Query
from inference.config import Config
from inference.lifecycle import Outcome, Reason
from inference.messages import Ending, Job, PoolBeat, ServerBeat, WorkerBeat
from inference.store import AuditReport, Page, RequestView
from inference.store.series import AuditRun, Sample
from sluice import runtime

CHUNK = 100
"""Requests per command: Redis collects so many in about a millisecond, and serves nobody else meanwhile."""
MAX_REQUESTS = 20_000
SHARE = 10
"""A read that took t seconds is not repeated within SHARE * t seconds ..."""
OLDEST = 10.0
"""... but an operator never looks at anything older than this, seconds."""


class Source(Protocol):
    """The part of the gateway that operators' pages use."""

    @property
    def config(self) -> Config: ...
    @property
    def aliases(self) -> builtins.list[str]: ...
    async def list(self, offset: int = 0, limit: int = 100, *, newest_first: bool = True) -> Page: ...
    async def view(self, request_id: str) -> RequestView | None: ...
    async def details(self, request_id: str) -> tuple[Job, builtins.list[tuple[int, str]]] | None: ...
    async def cancel(self, request_id: str, reason: Reason) -> Outcome | None: ...
    async def workers(self) -> builtins.list[WorkerBeat]: ...
    async def servers(self) -> builtins.list[ServerBeat]: ...
    async def pools(self) -> builtins.list[PoolBeat]: ...
    async def history(self, limit: int = 100) -> builtins.list[Ending]: ...
    async def outcomes(self) -> dict[str, int]: ...
    async def beat_ages(self, kind: Literal["workers", "servers", "pools"]) -> dict[str, float]: ...
    async def load(self) -> builtins.list[Sample]: ...
    async def audit(self) -> AuditReport: ...
    async def audits(self) -> builtins.list[AuditRun]: ...
    async def now_ms(self) -> int: ...


def source() -> Source:
    """This process's gateway."""
    return runtime.gateway()


class Roster:
    """All live requests, read at most once per second and shared by everybody who looks."""

    def __init__(self) -> None:
        self._views: list[RequestView] = []
        self._fresh_until = 0.0
        self._clock = 0.0
        self._source: Source | None = None
        self._task: asyncio.Task[list[RequestView]] | None = None

    async def all(self, gateway: Source) -> list[RequestView]:
        """Newest first; from memory where the last read is recent enough."""
        if gateway is self._source and time.monotonic() < self._fresh_until:
            return self._views
        task = self._task
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            task = self._task = asyncio.create_task(self._read(gateway), name="inflight-roster")
        return await asyncio.shield(task)

    def expire(self) -> None:
        """Read anew next time; called after a change that the operator wants to see."""
        self._fresh_until = 0.0

    def now_ms(self) -> int:
        """The Redis clock, going by the last read."""
        return int(self._clock + time.monotonic() * 1000)

    async def _read(self, gateway: Source) -> list[RequestView]:
        started = time.monotonic()
        seen: dict[str, RequestView] = {}
        # Oldest first: requests that arrive meanwhile go behind, and those that end meanwhile
        # make the rest move up, which costs an entry for one read and no more.
        for offset in range(0, MAX_REQUESTS, CHUNK):
            page = await gateway.list(offset, CHUNK, newest_first=False)
            seen.update((v.id, v) for v in page.items)
            self._clock = page.now_ms - time.monotonic() * 1000
            if offset + CHUNK >= page.total:
                break
            await asyncio.sleep(0)
        now = time.monotonic()
        self._views = list(reversed(seen.values()))
        self._source = gateway
        self._fresh_until = now + min(OLDEST, max(1.0, SHARE * (now - started)))
        return self._views


roster = Roster()


class Selection:
    """One page of what was asked for. ``matched`` of ``total`` live requests fit the filter."""

    __slots__ = ("items", "matched", "now_ms", "page", "pages", "total")

    def __init__(self, items: list[RequestView], matched: int, total: int, page: int, now_ms: int) -> None:
        self.items = items
        self.matched = matched
        self.total = total
        self.page = page
        self.pages = max(1, -(-matched // PER_PAGE))
        self.now_ms = now_ms


async def select(gateway: Source, query: Query) -> Selection:
    """The page that the query names, or the last one where there are fewer."""
    if query.id:
        view, now_ms = await gateway.view(query.id), await gateway.now_ms()
        found = [view] if view is not None and query.matches(view, now_ms) else []
        return Selection(found, len(found), len(found), 1, now_ms)
    if query.indexed:
        return await _from_index(gateway, query)
    views = await roster.all(gateway)
    now_ms = roster.now_ms()
    found = query.select(views, now_ms)
    page = min(query.page, max(1, -(-len(found) // PER_PAGE)))
    start = (page - 1) * PER_PAGE
    return Selection(found[start : start + PER_PAGE], len(found), len(views), page, now_ms)


async def _from_index(gateway: Source, query: Query) -> Selection:
    newest = query.sort == "age"
    start = (query.page - 1) * PER_PAGE
    got = await gateway.list(start, PER_PAGE, newest_first=newest)
    page = query.page
    if not got.items and page > 1:
        page = max(1, -(-got.total // PER_PAGE))
        got = await gateway.list((page - 1) * PER_PAGE, PER_PAGE, newest_first=newest)
    return Selection(got.items, got.total, got.total, page, got.now_ms)


async def matching_ids(gateway: Source, query: Query) -> list[str]:
    """Ids of all that match now, read anew and not from memory."""
    roster.expire()
    views = await roster.all(gateway)
    return [v.id for v in query.select(views, roster.now_ms())]
