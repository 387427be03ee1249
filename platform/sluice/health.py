"""``/livez``: the process runs. ``/readyz``: it should get traffic, and if not, why not. ``/metrics``."""

from __future__ import annotations

from sluice import metrics, runtime
from sluice.consumers import StreamingHttpConsumer


class LiveConsumer(StreamingHttpConsumer):
    """200 as long as the event loop turns, also through a whole drain."""

    async def get(self, body: bytes) -> None:
        await self.send_json(200, {"status": "live", "state": str(runtime.status.state)})


class ReadyConsumer(StreamingHttpConsumer):
    """200 when the server accepts work, Redis answers and a worker serves each model; else 503."""

    async def get(self, body: bytes) -> None:
        reasons = runtime.unready_reasons()
        state = str(runtime.status.state)
        if reasons:
            await self.send_json(503, {"status": "unready", "state": state, "reasons": reasons})
        else:
            await self.send_json(200, {"status": "ready", "state": state, "reasons": []})


class MetricsConsumer(StreamingHttpConsumer):
    """The Prometheus exposition of this host's processes."""

    async def get(self, body: bytes) -> None:
        text, content_type = await metrics.exposition()
        await self.send_bytes(200, text, [(b"content-type", content_type.encode())])
