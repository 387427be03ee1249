"""What an operator asked to see: filters, order and page, read from the URL and never trusted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from inference.store import RequestView

PER_PAGE = 50
MAX_PAGE = 10_000
_TEXT_LIMIT = 200

PHASES = ("queued", "prefill", "decode", "finishing", "blocked", "detached", "orphaned")
AGES = {"": "any age", "10": "10 s", "60": "1 min", "300": "5 min", "900": "15 min", "3600": "1 h"}

SORTS: dict[str, Callable[[RequestView], Any]] = {
    "age": lambda v: -v.created_ms,
    "id": lambda v: v.id,
    "phase": lambda v: (PHASES.index(phase_of(v)) if phase_of(v) in PHASES else 99, v.position or 0),
    "model": lambda v: v.model,
    "owner": lambda v: v.owner,
    "server": lambda v: v.server,
    "worker": lambda v: v.worker,
    "attempt": lambda v: v.attempt,
    "prompt": lambda v: v.prompt_tokens,
    "generated": lambda v: v.generated_tokens,
    "deadline": lambda v: v.deadline_ms or math.inf,
    "waited": lambda v: (v.claimed_ms or time.time() * 1000) - v.created_ms,
    # Infinity: no value yet.
    "ttft": lambda v: v.first_token_ms - v.created_ms if v.first_token_ms else math.inf,
    "last": lambda v: -v.last_token_ms if v.last_token_ms else math.inf,
}


def phase_of(view: RequestView) -> str:
    """The phase to show; a request whose server or worker is dead is ``orphaned`` before all else."""
    return "orphaned" if view.orphaned else view.phase


@dataclass(frozen=True, slots=True)
class Query:
    """Filters (empty: all), order (``-`` in front: descending) and page (1 first).

    ``older`` is an age in seconds; ``q`` is looked for in ids; ``id`` is one whole id.
    """

    q: str = ""
    phase: str = ""
    model: str = ""
    worker: str = ""
    server: str = ""
    owner: str = ""
    older: int = 0
    sort: str = "age"
    page: int = 1
    id: str = ""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Query:
        """Read a query string; what is malformed counts as not given."""

        def text(name: str) -> str:
            return str(data.get(name, "")).strip().replace("\x00", "")[:_TEXT_LIMIT]

        sort = text("sort")
        phase = text("phase")
        return cls(
            id=text("id"),
            q=text("q"),
            phase=phase if phase in PHASES else "",
            model=text("model"),
            worker=text("worker"),
            server=text("server"),
            owner=text("owner"),
            older=_number(text("older"), 0, 10**9),
            sort=sort if sort.removeprefix("-") in SORTS else "age",
            page=_number(text("page"), 1, MAX_PAGE),
        )

    @property
    def filtered(self) -> bool:
        return bool(
            self.id or self.q or self.phase or self.model or self.worker or self.server or self.owner or self.older
        )

    @property
    def indexed(self) -> bool:
        """Whether Redis can give the page from its index by age, without looking at every request."""
        return not self.filtered and self.sort in ("age", "-age")

    def matches(self, view: RequestView, now_ms: int) -> bool:
        return (
            (not self.id or self.id == view.id)
            and (not self.q or self.q in view.id)
            and (not self.phase or self.phase == phase_of(view))
            and (not self.model or self.model == view.model)
            and (not self.worker or self.worker == view.worker)
            and (not self.server or self.server == view.server)
            and (not self.owner or self.owner == view.owner)
            and (not self.older or now_ms - view.created_ms >= self.older * 1000)
        )

    def select(self, views: list[RequestView], now_ms: int) -> list[RequestView]:
        """Those that match, in order; equal ones newest first, so that rows do not jump about."""
        found = [v for v in views if self.matches(v, now_ms)]
        found.sort(key=lambda v: (v.created_ms, v.id), reverse=True)  # as Redis orders its index
        column = SORTS[self.sort.removeprefix("-")]
        found.sort(key=column, reverse=self.sort.startswith("-"))
        found.sort(key=lambda v: column(v) in (math.inf, ""))  # what has no value is last in both directions
        return found

    def with_sort(self, column: str) -> Query:
        """By this column; the other way round where it is the order already."""
        return replace(self, sort=f"-{column}" if self.sort == column else column, page=1)

    def with_page(self, page: int) -> Query:
        return replace(self, page=page)

    def fields(self) -> dict[str, str]:
        """The parts that differ from the default, for hidden fields and links."""
        default = Query()
        return {
            name: str(getattr(self, name))
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(default, name)
        }

    def encode(self) -> str:
        return urlencode(self.fields())

    def describe(self) -> str:
        """The filters as words; none where everything is shown."""
        names = {"q": "id contains", "older": "older than (s)"}
        parts = [f"{names.get(k, k)} {v}" for k, v in self.fields().items() if k not in ("sort", "page")]
        return ", ".join(parts)


def _number(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        return least
    return min(max(int(text), least), most)
