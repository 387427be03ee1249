"""The text of a scrape, for one process or for all that share ``PROMETHEUS_MULTIPROC_DIR``."""

from __future__ import annotations

import asyncio
import os

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from inference import metrics as counted
from inference import multiproc
from sluice import runtime
from sluice.metrics.live import LiveCollector, Snapshot

_live = LiveCollector()
_registered = False
_scrape = asyncio.Lock()


async def exposition() -> tuple[bytes, str]:
    """The text of a scrape and its content type. One at a time; the text is made off the loop."""
    global _registered
    async with _scrape:
        if not _registered:
            counted.know(s.alias for s in runtime.config().model_specs())
            REGISTRY.register(_live)
            _registered = True
        _live.snapshot = await Snapshot.take(runtime.gateway()) if runtime.started() else Snapshot()
        return await runtime.offload(_text), CONTENT_TYPE_LATEST


def _text() -> bytes:
    folder = os.environ.get(multiproc.VARIABLE)
    if not folder:
        return generate_latest(REGISTRY)
    # Several processes of this host count into files; gauges are still read as above.
    merged = CollectorRegistry()
    merged.register(multiproc.Merged(folder))
    merged.register(_live)
    return generate_latest(merged)
