"""``/metrics``: what the core counted (:mod:`inference.metrics`) and what is in flight at the scrape."""

from __future__ import annotations

from typing import Any

from inference.metrics import accepted, ended, read
from sluice.metrics.exposition import exposition

__all__ = ["accepted", "ended", "exposition", "hooks", "read"]


def hooks() -> dict[str, Any]:
    """What a :class:`~inference.gateway.Gateway` is to call."""
    return {"on_accepted": accepted, "on_ending": ended, "on_stream": read}
