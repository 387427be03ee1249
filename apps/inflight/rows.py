"""How a request, an ending or an amount is shown. Plain values only; templates and scripts escape them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.contrib.admin.utils import quote
from django.urls import reverse

from apps.inflight.query import phase_of
from inference.store import RequestView

COLUMNS: tuple[tuple[str, str, str], ...] = (
    # name, heading, column to sort by ("" for none); what an operator looks at first comes first
    ("id", "Request", "id"),
    ("phase", "Phase", "phase"),
    ("owner", "Owner", "owner"),
    ("model", "Model", "model"),
    ("age", "Age", "age"),
    ("waited", "In queue", "waited"),
    ("ttft", "TTFT", "ttft"),
    ("prompt", "Tokens in", "prompt"),
    ("generated", "Tokens out", "generated"),
    ("rate", "Tokens/s", ""),
    ("last", "Last token", "last"),
    ("deadline", "Deadline", "deadline"),
    ("worker", "Worker", "worker"),
    ("attempt", "Attempt", "attempt"),
    ("server", "Server", "server"),
    ("via", "Via", ""),
    ("client", "Client", ""),
)
NUMBERS = frozenset({"attempt", "age", "waited", "ttft", "prompt", "generated", "rate", "last", "deadline"})


@dataclass(frozen=True, slots=True)
class Cell:
    """One value: fixed ``text``, or a time on the Redis clock that is shown counting up or down.

    Attributes:
        since: count up from this moment, ms.
        until: count down to this moment, ms.
        hint: more words, as a tooltip.
        tone: ``warn`` or ``bad`` where the value deserves a look.
        link: address of a page about the value.
    """

    text: str = ""
    since: int = 0
    until: int = 0
    hint: str = ""
    tone: str = ""
    link: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name)}

    def shown(self, now_ms: int) -> str:
        if self.since:
            return duration(now_ms - self.since)
        if self.until:
            return duration(self.until - now_ms)
        return self.text


Row = dict[str, Cell]


def duration(ms: float) -> str:
    """Three significant figures at most: ``0.42 s``, ``12.3 s``, ``4 m 05 s``, ``2 h 03 m``."""
    if ms < 0:
        return f"-{duration(-ms)}" if ms <= -1000 else "0.00 s"
    seconds = ms / 1000
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def amount(size: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def request_url(request_id: str) -> str:
    """The admin page of one request; ``quote`` as the admin does it, for ids of any characters."""
    return reverse("admin:inflight_inflightrequest_change", args=(quote(request_id),))


def rate_of(view: RequestView) -> float:
    """Tokens per second since the first token; 0 where there is too little to tell."""
    took = view.last_token_ms - view.first_token_ms
    return (view.generated_tokens - 1) * 1000 / took if took > 0 and view.generated_tokens > 1 else 0.0


def row(view: RequestView, owner: str, rate: float | None = None) -> Row:
    """The cells of one request. ``owner`` is its name for people, ``rate`` tokens/s just now."""
    phase = phase_of(view)
    rate = rate_of(view) if rate is None else rate
    cells = {
        "id": Cell(view.id, link=request_url(view.id)),
        "phase": _phase(view, phase),
        "model": Cell(view.model),
        "via": Cell(f"{view.endpoint} · {view.transport}", hint="resumable" if view.resumable else ""),
        "owner": Cell(owner or view.owner, hint=view.owner),
        "client": _client(view, phase),
        "server": Cell(view.server or "-"),
        "worker": Cell(view.worker or "-"),
        "attempt": Cell(str(view.attempt), tone="warn" if view.attempt > 1 else ""),
        "age": Cell(since=view.created_ms),
        "waited": _waited(view),
        "ttft": Cell(duration(view.first_token_ms - view.created_ms)) if view.first_token_ms else Cell("-"),
        "prompt": Cell(str(view.prompt_tokens)),
        "generated": Cell(f"{view.generated_tokens} / {view.max_tokens}"),
        "rate": Cell(f"{rate:.1f}") if rate else Cell("-"),
        "last": Cell(since=view.last_token_ms) if view.last_token_ms else Cell("-"),
        "deadline": Cell(until=view.deadline_ms) if view.deadline_ms else Cell("none"),
    }
    return {name: cells[name] for name, _, _ in COLUMNS}


def _phase(view: RequestView, phase: str) -> Cell:
    if phase == "queued" and view.position is not None:
        return Cell(f"queued, place {view.position + 1}", hint=f"priority {view.priority}")
    if phase == "orphaned":
        return Cell(phase, hint="its server or worker is dead; it is cleared within seconds", tone="bad")
    if phase == "blocked":
        since = datetime.fromtimestamp(view.blocked_since_ms / 1000, UTC).strftime("%H:%M:%S UTC")
        return Cell("blocked by its client", hint=f"tokens wait since {since} because its client does not take them",
                    tone="warn")  # fmt: skip
    return Cell(phase, tone="warn" if phase == "detached" else "")


def _client(view: RequestView, phase: str) -> Cell:
    """Whether somebody listens, and from where. Its server is the only one to know, if it is alive."""
    if phase == "detached":
        return Cell(f"gone · {view.client}" if view.client else "gone", hint="it may attach again", tone="warn")
    connected = "unknown" if phase == "orphaned" else "connected"
    return Cell(f"{connected} · {view.client}" if view.client else connected)


def _waited(view: RequestView) -> Cell:
    if view.claimed_ms:
        return Cell(duration(view.claimed_ms - view.created_ms))
    return Cell(since=view.created_ms)
