"""How benchmarks show what they measured: Markdown tables, and plots as small SVG files.

The plots are written by hand because they have to be readable on light and dark pages alike, which
takes a style sheet inside the SVG, and because eighty lines need no library of ten megabytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.processes import ROOT

FOLDER = ROOT / "docs" / "benchmarks"

Series = Mapping[str, Sequence[tuple[float, float]]]

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, BOTTOM = 64, 16, 48
LEGEND = 24
"""Where the legend's first line begins; each takes 18."""
COLOURS = ("#3b82c4", "#d9772b", "#3a9d5d", "#b0529b", "#8a7a2f", "#c0504d")
STYLE = """text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:14px}
.g{stroke:#ccc;stroke-width:1}.l{fill:none;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#ddd}.g{stroke:#555}}"""


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median of every number that all rows have."""
    keys = [k for k, v in rows[0].items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return {k: statistics.median(r[k] for r in rows) for k in keys}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print(f"\n{title}\n\n{table(head, rows)}", flush=True)


def number(value: float) -> str:
    """Three digits, with k for thousands."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g} k"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def plot(name: str, title: str, x_label: str, y_label: str, series: Series, *, log_x: bool = False) -> Path:
    """Write a line chart to ``docs/benchmarks/NAME.svg``; the y axis begins at 0.

    Args:
        series: points (x, y) by name, each in the order of x.
        log_x: a logarithmic x axis, with a mark at every x that was measured.
    """
    labels, lines = _legend(list(series))
    ceiling = LEGEND + 18 * lines + 6
    xs = sorted({x for points in series.values() for x, _ in points})
    top = _round_up(max(y for points in series.values() for _, y in points))
    place = (lambda x: math.log(x)) if log_x else (lambda x: x)
    low, high = place(xs[0]) if log_x else 0.0, place(xs[-1])

    def px(x: float) -> float:
        return LEFT + (place(x) - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - ceiling - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text class="t" x="{LEFT}" y="18">{escape(title)}</text>',
    ]
    for step in range(5):
        y = top * step / 4
        out.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{number(y)}</text>')
    last = -100.0
    for x in xs:
        if px(x) - last > 34:
            last = px(x)
            out.append(f'<text x="{last:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(x)}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x_label)}</text>')
    out.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(y_label)}</text>')
    for colour, points, (label, left, line) in zip(COLOURS, series.values(), labels, strict=False):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        out.append(f'<polyline class="l" stroke="{colour}" points="{path}"/>')
        out += [f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = LEGEND + 18 * line
        out.append(f'<rect x="{left}" y="{y}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{left + 14}" y="{y + 9}">{escape(label)}</text>')
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / f"{name}.svg"
    target.write_text("\n".join([*out, "</svg>"]) + "\n")
    return target


def _legend(names: Sequence[str]) -> tuple[list[tuple[str, int, int]], int]:
    """Each name with its place (pixels, line), and the number of lines."""
    places, left, line = [], LEFT, 0
    for name in names:
        width = 28 + 7 * len(name)
        if left > LEFT and left + width > WIDTH - RIGHT:
            left, line = LEFT, line + 1
        places.append((name, left, line))
        left += width
    return places, line + 1


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return next((m * power for m in (1, 2, 4, 5, 8) if m * power >= value), 10 * power)
