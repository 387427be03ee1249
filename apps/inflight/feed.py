"""What has changed on an operator's page since he last heard: the diff behind its event stream."""

from __future__ import annotations

import asyncio
from typing import Any

from channels.db import database_sync_to_async

from apps.inflight import owners
from apps.inflight.query import Query
from apps.inflight.roster import Selection, Source, select
from apps.inflight.rows import Cell, Row, rate_of, row
from inference.store import RequestView

HISTORY_LOOK = 200


class Feed:
    """One page's view. Bounded: remembers one page of rows, whatever is in flight."""

    def __init__(self, gateway: Source, query: Query) -> None:
        self._gateway = gateway
        self._query = query
        self._rows: dict[str, Row] | None = None
        self._counts: tuple[int, ...] = ()
        self._tokens: dict[str, tuple[int, int]] = {}

    async def update(self) -> dict[str, Any]:
        """The change since the last call; the first call gives everything.

        Keys: ``now`` (ms, Redis clock); ``reset`` on the first; where they changed
        ``counts`` (total, matched, page, pages) and ``order`` (ids); ``cells`` (id ->
        column -> cell) and ``ended`` (id -> how).
        """
        selection = await select(self._gateway, self._query)
        rows = await self._rows_of(selection)
        message: dict[str, Any] = {"now": selection.now_ms}
        before = self._rows
        if before is None:
            message["reset"] = True
            before = {}
        counts = (selection.total, selection.matched, selection.page, selection.pages)
        if counts != self._counts:
            message["counts"] = dict(zip(("total", "matched", "page", "pages"), counts, strict=True))
        if list(rows) != list(before):
            message["order"] = list(rows)
        cells = {i: changed for i, r in rows.items() if (changed := _changed(before.get(i), r))}
        ended, last = await self._ended([i for i in before if i not in rows])
        if ended:
            message["ended"] = ended
        if cells | last:
            message["cells"] = cells | last
        self._rows, self._counts = rows, counts
        return message

    async def _rows_of(self, selection: Selection) -> dict[str, Row]:
        wanted = {v.owner for v in selection.items}
        names = owners.known(wanted)
        if len(names) < len(wanted):
            names = await database_sync_to_async(owners.names)(wanted)
        rows = {v.id: row(v, names.get(v.owner, ""), self._rate(v, selection.now_ms)) for v in selection.items}
        self._tokens = {v.id: (v.generated_tokens, selection.now_ms) for v in selection.items}
        return rows

    def _rate(self, view: RequestView, now_ms: int) -> float:
        """Tokens per second since the last look; since the first token where there was none."""
        before = self._tokens.get(view.id)
        if before is None or now_ms <= before[1]:
            return rate_of(view)
        return max(0, view.generated_tokens - before[0]) * 1000 / (now_ms - before[1])

    async def _ended(self, gone: list[str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """How those ended that have left the page, and their last cells; none for those that only moved off it."""
        ended: dict[str, str] = {}
        cells: dict[str, dict[str, Any]] = {}
        if not gone:
            return ended, cells
        history = {e.id: e for e in await self._gateway.history(HISTORY_LOOK)}
        for request_id in gone:
            if (ending := history.get(request_id)) is not None:
                ended[request_id] = f"{ending.state} ({ending.reason})"
                # What came since the last look belongs to the row that is struck through.
                cells[request_id] = {"generated": Cell(str(ending.generated_tokens)).to_json()}
        others = [request_id for request_id in gone if request_id not in ended]
        views = await asyncio.gather(*map(self._gateway.view, others))  # in one round trip
        ended.update((request_id, "ended") for request_id, view in zip(others, views, strict=True) if view is None)
        return ended, cells


def _changed(before: Row | None, now: Row) -> dict[str, Any]:
    return {name: cell.to_json() for name, cell in now.items() if before is None or before.get(name) != cell}
