"""The reference in ``docs/metrics.md``, made from the definitions.

python -m sluice.metrics.reference      bring the page up to date
"""

from __future__ import annotations

import os
from pathlib import Path

BEGIN, END = "<!-- made from the code: begin -->", "<!-- made from the code: end -->"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"

#: The values that each label can have.
LABELS = {
    "model": "a configured alias, or `other`",
    "endpoint": "`chat`, `completions`, `generate`, `ws`, `responses`, `embeddings`, `chat-ui`, or `other`",
    "transport": "`sse`, `json`, `ws`, or `other`",
    "outcome": "requests: `finished`, `cancelled`, `failed`; streams: `complete`, `error`, `abandoned`",
    "reason": (
        "finished: `stop`, `length`, `tool_calls`; cancelled: `client_gone`, `user`, `admin`, `deadline`, `shutdown`; "
        "failed: `worker_lost`, `engine_error`, `state_lost`; refused: `unknown_model`, `not_serving`, `too_large`, "
        "`overloaded`, `store_unavailable`"
    ),
    "state": "of what the metric counts: requests, workers, cache blocks, servers",
    "priority": "`high`, `normal`, `low`",
    "route": "the template of a path such as `/v1/requests/{request_id}`, or `static`, or `unmatched`",
    "kind": "`http`, `sse`, `websocket`; reaped: what had gone wrong; drain: `exchanges`, `seconds`",
    "result": "`continued`, `failed`",
    "role": "`server`, `worker`",
}


def tables() -> str:
    """The part of the page between the marks, in Markdown."""
    from inference.metrics import DEFINED
    from sluice.metrics.live import LIVE

    rows = {name: (kind, text, labels, "sum") for name, (kind, text, labels) in DEFINED.items()}
    for name, (text, labels) in LIVE.items():
        rows[name] = ("counter" if name.endswith("_total") else "gauge", text, labels, "max")
    lines = ["| metric | type | labels | over servers | meaning |", "|---|---|---|---|---|"]
    for name, (kind, text, labels, how) in sorted(rows.items()):
        named = ", ".join(f"`{label}`" for label in labels) or "-"
        lines.append(f"| `{name}` | {kind} | {named} | {how} | {text} |")
    used = {label for _, _, labels, _ in rows.values() for label in labels}
    lines += ["", "| label | values |", "|---|---|"]
    lines += [f"| `{label}` | {LABELS[label]} |" for label in sorted(used)]
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with the part between the marks as it must be."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def main() -> None:
    """Rewrite the page."""
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sluice.settings")
    django.setup()
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
