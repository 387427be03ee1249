"""The data of the other pages: processes, endings, one request's timeline, health."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from datetime import UTC, datetime
from typing import Any

from apps.inflight.roster import Source
from apps.inflight.rows import amount, duration, request_url
from inference.lifecycle import REASONS
from inference.messages import Ending, ServerBeat, WorkerBeat
from inference.store import AuditReport, RequestView

HISTORY = 1000
SHOWN_ENDINGS = 200
OUTCOMES = sorted(f"{state} ({reason})" for state, reasons in REASONS.items() for reason in reasons)

#: Results of the audits that this process has run, newest first: (report, how long it took).
audits: deque[tuple[AuditReport, str]] = deque(maxlen=20)


async def processes(gateway: Source) -> dict[str, Any]:
    """Tables of workers, servers and pools."""
    workers, servers, pools, now_ms = await asyncio.gather(
        gateway.workers(), gateway.servers(), gateway.pools(), gateway.now_ms()
    )
    return {
        "workers": [_worker(w, now_ms) for w in workers],
        "servers": [_server(s, now_ms) for s in servers],
        "pools": [{"beat": p, "uptime": duration(now_ms - p.started_ms)} for p in pools],
    }


def _worker(beat: WorkerBeat, now_ms: int) -> dict[str, Any]:
    stats = beat.stats
    rate = stats.generated_tokens / stats.step_seconds if stats.step_seconds else 0.0
    used = 100 * stats.blocks_used / stats.blocks_total if stats.blocks_total else 0
    return {
        "beat": beat,
        "models": ", ".join(m.alias for m in beat.models) or "-",
        "load": f"{stats.running} of {stats.slots}, {stats.waiting} waiting",
        "cache": f"{stats.blocks_used} of {stats.blocks_total} ({used:.0f} %)" if stats.blocks_total else "-",
        "rate": f"{rate:.1f}",
        "step": f"{stats.last_step_seconds * 1000:.0f} ms",
        "memory": amount(beat.rss_bytes) if beat.rss_bytes else "-",
        "device_memory": amount(beat.device_bytes) if beat.device_bytes else "-",
        "uptime": duration(now_ms - beat.started_ms),
    }


def _server(beat: ServerBeat, now_ms: int) -> dict[str, Any]:
    left = beat.drain_left_seconds
    return {
        "beat": beat,
        "exchanges": sorted(beat.exchanges.items()),
        "open": sum(beat.exchanges.values()),
        "memory": amount(beat.rss_bytes) if beat.rss_bytes else "-",
        "uptime": duration(now_ms - beat.started_ms),
        "drain_left": duration(left * 1000) if left is not None else "",
    }


async def endings(gateway: Source, outcome: str) -> dict[str, Any]:
    """The bounded history, counted over the last minutes; lines of one outcome or of all."""
    history, totals, now_ms = await asyncio.gather(gateway.history(HISTORY), gateway.outcomes(), gateway.now_ms())
    wanted = outcome if outcome in OUTCOMES else ""
    lines = [_line(e, now_ms) for e in history if not wanted or f"{e.state} ({e.reason})" == wanted]
    return {
        "lines": lines[:SHOWN_ENDINGS],
        "shown": min(len(lines), SHOWN_ENDINGS),
        "found": len(lines),
        "outcome": wanted,
        "outcomes": OUTCOMES,
        "counts": _counts(history, totals, now_ms),
        # A busy server fills the history in less than an hour; its counts are then of that time only.
        "covers": duration(now_ms - history[-1].ended_ms) if len(history) >= HISTORY else "",
    }


def _line(e: Ending, now_ms: int) -> dict[str, Any]:
    return {
        "ending": e,
        "link": request_url(e.id),
        "ago": duration(now_ms - e.ended_ms),
        "took": duration(e.ended_ms - e.created_ms),
        "ttft": duration(e.first_token_ms - e.created_ms) if e.first_token_ms else "-",
    }


def _counts(history: list[Ending], totals: dict[str, int], now_ms: int) -> list[dict[str, Any]]:
    def within(minutes: int) -> Counter[str]:
        since = now_ms - minutes * 60_000
        return Counter(f"{e.state} ({e.reason})" for e in history if e.ended_ms >= since)

    five, hour = within(5), within(60)
    ever = {f"{k.partition(':')[0]} ({k.partition(':')[2]})": n for k, n in totals.items()}
    names = sorted({*five, *hour, *ever})
    return [{"name": n, "five": five[n], "hour": hour[n], "ever": ever.get(n, 0)} for n in names]


def timeline(view: RequestView | None, ending: Ending | None) -> list[dict[str, str]]:
    """What happened to a request and when, each with the time since it was accepted."""
    record: Any = view or ending
    steps = [("Accepted and queued", record.created_ms)]
    attempts = view.attempt if view else ending.attempts if ending else 0
    claimed = "Claimed by a worker" if attempts <= 1 else f"Claimed by a worker (attempt {attempts})"
    steps += [(claimed, record.claimed_ms), ("First token", record.first_token_ms)]
    if view is not None:
        steps.append(("Last token so far", view.last_token_ms))
        steps.append(("Deadline", view.deadline_ms))
    if ending is not None:
        steps.append((f"Ended: {ending.state} ({ending.reason})", ending.ended_ms))
    return [{"what": what, "at": _clock(ms), "after": duration(ms - record.created_ms)} for what, ms in steps if ms]


def _clock(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


async def health(gateway: Any, run: bool) -> dict[str, Any]:
    """The audits so far (one more with ``run``) and the state of Redis, with warnings."""
    if run:
        started = time.monotonic()
        report = await gateway.audit()
        audits.appendleft((report, duration((time.monotonic() - started) * 1000)))
    started = time.monotonic()
    await gateway.now_ms()
    latency = (time.monotonic() - started) * 1000
    return {
        "audits": [{"report": r, "at": _clock(r.checked_ms), "took": took} for r, took in audits],
        "latency": f"{latency:.1f} ms",
        "latency_slow": latency > 50,
        **await _redis(gateway),
    }


async def _redis(gateway: Any) -> dict[str, Any]:
    raw: Any = await gateway.redis.call("INFO")
    info = raw if isinstance(raw, dict) else _parse_info(raw)
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy = str(info.get("maxmemory_policy", ""))
    version = info.get("valkey_version") or info.get("redis_version", "")
    warnings = []
    if policy not in ("noeviction", ""):
        warnings.append(f"The eviction policy is {policy}: Redis may drop running requests. Set it to noeviction.")
    if limit and used > 0.8 * limit:
        warnings.append(f"Redis uses {100 * used // limit} % of its memory limit.")
    return {
        "redis_version": f"{info.get('server_name', 'redis')} {version}",
        "redis_memory": f"{amount(used)} of {amount(limit) if limit else 'no limit'}",
        "redis_policy": policy or "-",
        "redis_clients": info.get("connected_clients", "-"),
        "redis_uptime": duration(int(info.get("uptime_in_seconds", 0)) * 1000),
        "warnings": warnings,
    }


def _parse_info(raw: bytes | str) -> dict[str, str]:
    text = raw.decode() if isinstance(raw, bytes) else raw
    pairs = (line.partition(":") for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value for key, _, value in pairs}
