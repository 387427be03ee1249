"""The load of the last hour as lines for inline SVG: shapes only, so that the page's styles colour them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from apps.inflight.rows import duration
from inference.store.series import PERIOD, SPAN, Sample

WIDTH, HEIGHT = 720, 120
"""Of the drawing, in its own units; it is stretched to the page."""
_BREAK_MS = 4 * PERIOD * 1000
"""A longer time without a value breaks the line: nothing was measured, which is not the same as nothing."""
_DOT = 6
"""Stretches narrower than this, in units of the drawing, are drawn as dots."""

Value = Callable[[Sample], float]


def charts(samples: Sequence[Sample], now_ms: int) -> list[dict[str, Any]]:
    """Requests in flight, tokens per second and TTFT; each with its lines, its scale and a summary in words."""
    plain: Callable[[float], str] = lambda value: f"{value:.0f}"  # noqa: E731
    return [
        _chart("Requests in flight", samples, now_ms, plain, [("in flight", lambda s: s.inflight),
                                                             ("with a worker", lambda s: s.running)]),
        _chart("Tokens per second", samples, now_ms, lambda v: f"{v:.1f}" if v < 10 else plain(v),
               [("all workers", lambda s: s.rate)]),
        _chart("Time to first token", samples, now_ms, duration,
               [("median", lambda s: s.ttft_p50), ("95th percentile", lambda s: s.ttft_p95)]),
    ]  # fmt: skip


def _chart(
    title: str, samples: Sequence[Sample], now_ms: int, shown: Callable[[float], str], lines: list[tuple[str, Value]]
) -> dict[str, Any]:
    since = now_ms - int(SPAN * 1000)
    recent = [s for s in samples if s.at_ms >= since]
    values = [[(s.at_ms, v) for s in recent if (v := value(s)) >= 0] for _, value in lines]
    top = nice(max((v for line in values for _, v in line), default=0))
    drawn = []
    for (name, _), line in zip(lines, values, strict=True):
        last, most = (shown(line[-1][1]), shown(max(v for _, v in line))) if line else ("-", "-")
        drawn.append({"name": name, "paths": _paths(line, since, top), "last": last, "most": most})
    words = "; ".join(f"{d['name']}: last {d['last']}, highest {d['most']}" for d in drawn)
    summary = f"{title} over the last hour. {words if recent else 'Nothing has been measured yet'}."
    return {"title": title, "lines": drawn, "top": shown(top), "summary": summary, "empty": not any(values)}


def nice(value: float) -> float:
    """The scale's end: the least of 1, 2, 5, 10, 20, ... that is not below ``value``."""
    if value <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _paths(line: list[tuple[int, float]], since: int, top: float) -> list[dict[str, Any]]:
    """The ``points`` of one polyline for each stretch without a break; ``dot``: too short to be seen as a line."""
    stretches: list[list[tuple[float, float]]] = []
    before = None
    for at, value in line:
        if before is None or at - before > _BREAK_MS:
            stretches.append([])
        before = at
        stretches[-1].append(((at - since) / (SPAN * 1000) * WIDTH, HEIGHT * (1 - value / top)))
    for points in stretches:
        if len(points) == 1:  # a line needs two ends; where they are one, its round caps are the dot
            points *= 2
    return [
        {"points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points), "dot": points[-1][0] - points[0][0] < _DOT}
        for points in stretches
    ]
