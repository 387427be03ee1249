"""The metrics of Sluice: their definitions, who feeds them, and ``/metrics``.

Counters and histograms are fed by endings: the process that settles a request -
exactly one does - observes its summary, whose times are all of one clock.
Gauges are never kept: they are read, at the scrape, from what is really in
flight - this process's own exchanges, the queue, the heartbeats of others - so
that a killed process leaves nothing behind in them.

Labels come from closed sets: configured aliases, route templates, endpoints,
outcomes. A name that a client made up counts as ``other``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest, multiprocess
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from inference.errors import SluiceError
from inference.gateway import Gateway, RequestSpec, RequestStream
from inference.messages import Ending, PoolBeat, ServerBeat, WorkerBeat
from sluice import runtime

#: OpenTelemetry's buckets for time to first token, and for the whole request, extended to ten minutes.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                300, 600)  # fmt: skip
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 30,
               60)  # fmt: skip
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 160, 300,
                    600)  # fmt: skip

ENDPOINTS = frozenset({"chat", "completions", "generate", "ws", "responses", "embeddings", "chat-ui"})
TRANSPORTS = frozenset({"sse", "json", "ws"})

#: Observations put into a histogram before the event loop gets its turn again.
_CHUNK = 500

STARTED = Counter("sluice_requests_started", "Requests accepted into the queue.", ["endpoint", "transport", "model"])
REQUESTS = Counter(
    "sluice_requests",
    "Requests that have ended, by how. The sum over outcomes is what was started and is not in flight.",
    ["endpoint", "transport", "model", "outcome", "reason"],
)
STREAMS = Counter("sluice_streams", "Streams whose reader is done, by how the stream itself ended.", ["outcome"])
TTFT = Histogram(
    "sluice_time_to_first_token_seconds",
    "From acceptance, queue included, to the first token; once per request that produced one.",
    ["model"],
    buckets=TTFT_BUCKETS,
)
ITL = Histogram(
    "sluice_inter_token_latency_seconds",
    "Between consecutive tokens of a request as they reached its server.",
    ["model"],
    buckets=ITL_BUCKETS,
)
DURATION = Histogram(
    "sluice_request_duration_seconds", "From acceptance to the end.", ["model", "outcome"], buckets=DURATION_BUCKETS
)
QUEUE_WAIT = Histogram(
    "sluice_queue_wait_seconds", "From acceptance to the first claim.", ["model"], buckets=TTFT_BUCKETS
)
PROMPT_TOKENS = Counter("sluice_prompt_tokens", "Prompt tokens of ended requests.", ["model"])
GENERATED_TOKENS = Counter("sluice_generated_tokens", "Generated tokens of ended requests.", ["model"])
CACHED_TOKENS = Counter("sluice_cached_prompt_tokens", "Prompt tokens found in a worker's prefix cache.", ["model"])


# -- fed by the gateway --------------------------------------------------------------------------------


def _model(alias: str) -> str:
    return alias if alias in {s.alias for s in runtime.config().model_specs()} else "other"


def _closed(value: str, allowed: frozenset[str]) -> str:
    return value if value in allowed else "other"


def accepted(spec: RequestSpec) -> None:
    """A request was stored."""
    STARTED.labels(_closed(spec.endpoint, ENDPOINTS), _closed(spec.transport, TRANSPORTS), _model(spec.job.model)).inc()


def ended(ending: Ending) -> None:
    """This process settled a request."""
    model = _model(ending.model)
    REQUESTS.labels(
        _closed(ending.endpoint, ENDPOINTS),
        _closed(ending.transport, TRANSPORTS),
        model,
        ending.state,
        ending.reason,
    ).inc()
    DURATION.labels(model, ending.state).observe(max(0, ending.ended_ms - ending.created_ms) / 1000)
    if ending.claimed_ms:
        QUEUE_WAIT.labels(model).observe(max(0, ending.claimed_ms - ending.created_ms) / 1000)
    if ending.first_token_ms:
        TTFT.labels(model).observe(max(0, ending.first_token_ms - ending.created_ms) / 1000)
    PROMPT_TOKENS.labels(model).inc(ending.prompt_tokens)
    GENERATED_TOKENS.labels(model).inc(ending.generated_tokens)


def read(stream: RequestStream) -> None:
    """A reader is done with its stream: count how, and file the gaps between its tokens."""
    if stream.finish in ("stop", "length"):
        outcome = "complete"
    elif stream.ended is not None or stream.finish is not None:
        outcome = "error"
    else:
        outcome = "abandoned"
    STREAMS.labels(outcome).inc()
    model = _model(stream.job.model) if stream.job is not None else "other"
    if stream.cached:
        CACHED_TOKENS.labels(model).inc(stream.cached)
    if len(stream.gaps):
        _file(ITL.labels(model), stream.gaps)


def _file(histogram: Any, gaps: Any, start: int = 0) -> None:
    # Not on the per-token path, and never long enough at a time to be felt there.
    for gap in gaps[start : start + _CHUNK]:
        histogram.observe(gap)
    if start + _CHUNK < len(gaps):
        asyncio.get_running_loop().call_soon(_file, histogram, gaps, start + _CHUNK)


# -- read at the scrape --------------------------------------------------------------------------------


class Snapshot:
    """What is in flight now, for one scrape."""

    def __init__(self) -> None:
        self.queued: dict[str, dict[str, int]] = {}
        self.running: dict[str, int] = {}
        self.detached = 0
        self.oldest_age = 0.0
        self.workers: list[WorkerBeat] = []
        self.servers: list[ServerBeat] = []
        self.pools: list[PoolBeat] = []
        self.redis_up = False

    @classmethod
    async def take(cls, gateway: Gateway) -> Snapshot:
        """Ask Redis once; what it does not answer stays empty."""
        snapshot = cls()
        try:
            async with asyncio.timeout(2.0):
                await snapshot._fill(gateway)
        except (SluiceError, TimeoutError):
            snapshot.redis_up = False
        return snapshot

    async def _fill(self, gateway: Gateway) -> None:
        aliases = gateway.aliases
        queued, running, detached, oldest, self.workers, self.servers, self.pools = await asyncio.gather(
            asyncio.gather(*(gateway.views.queued_by_priority(a) for a in aliases)),
            asyncio.gather(*(gateway.views.running(a) for a in aliases)),
            gateway.views.detached(),
            gateway.views.oldest_age(),
            gateway.workers(),
            gateway.servers(),
            gateway.pools(),
        )
        self.queued = dict(zip(aliases, queued, strict=True))
        self.running = dict(zip(aliases, running, strict=True))
        self.detached, self.oldest_age = detached, oldest
        self.redis_up = True


class LiveCollector:
    """Turns the latest snapshot and this process's own state into gauges."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._exchanges()
        yield from self._workers()
        yield from self._process()

    def _requests(self) -> Iterator[Metric]:
        s = self.snapshot
        inflight = GaugeMetricFamily("sluice_requests_inflight", "Requests not yet ended.", labels=["state", "model"])
        depth = GaugeMetricFamily("sluice_queue_depth", "Requests waiting for a worker.", labels=["model", "priority"])
        for model, classes in s.queued.items():
            inflight.add_metric(["queued", model], sum(classes.values()))
            for priority, count in classes.items():
                depth.add_metric([model, priority], count)
        for model, count in s.running.items():
            inflight.add_metric(["running", model], count)
        yield inflight
        yield depth
        yield gauge("sluice_requests_detached", "Resumable requests that nobody reads now.", s.detached)
        yield gauge("sluice_oldest_inflight_age_seconds", "Age of the oldest request in flight.", s.oldest_age)

    def _exchanges(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "sluice_http_exchanges_inflight",
            "HTTP and WebSocket exchanges from their first byte to their last, over all servers.",
            labels=["route", "kind"],
        )
        counts = dict(runtime.exchanges.counts())
        own = runtime.gateway().id if runtime.started() else ""
        for server in self.snapshot.servers:
            if server.id != own:
                for name, count in server.exchanges.items():
                    kind, _, route = name.partition(" ")
                    counts[kind, route] = counts.get((kind, route), 0) + count
        for (kind, route), count in sorted(counts.items()):
            family.add_metric([route, kind], count)
        yield family

    def _workers(self) -> Iterator[Metric]:
        workers = self.snapshot.workers
        up = GaugeMetricFamily("sluice_worker_up", "Workers by what they are doing.", labels=["state"])
        for state in ("starting", "ready", "quiet", "draining"):
            up.add_metric([state], sum(w.state == state for w in workers))
        yield up
        total = {name: sum(getattr(w.stats, name) for w in workers) for name in STATS}
        for name, text in STATS.items():
            if not name.startswith("blocks_"):
                yield gauge(f"sluice_engine_{name}", text, total[name])
        blocks = GaugeMetricFamily("sluice_kv_blocks", "KV cache blocks of all workers.", labels=["state"])
        blocks.add_metric(["used"], total["blocks_used"])
        blocks.add_metric(["cached"], total["blocks_cached"])
        blocks.add_metric(["total"], total["blocks_total"])
        yield blocks
        steps = [w.stats.last_step_seconds for w in workers if w.stats.running]
        yield gauge("sluice_step_duration_seconds", "The longest latest engine step.", max(steps, default=0.0))
        restarts = CounterMetricFamily("sluice_worker_restarts", "Workers that the pools replaced.")
        restarts.add_metric([], sum(p.restarts for p in self.snapshot.pools))
        yield restarts

    def _process(self) -> Iterator[Metric]:
        yield gauge("sluice_redis_up", "Whether Redis answered this scrape.", int(self.snapshot.redis_up))
        yield gauge("sluice_event_loop_lag_seconds", "Worst lag of this loop in ten seconds.", runtime.lag.worst)
        state = GaugeMetricFamily("sluice_drain_state", "1 for the state this server is in.", labels=["state"])
        for name in ("serving", "pausing", "refusing", "finishing", "ending"):
            state.add_metric([name], int(str(runtime.status.state) == name))
        yield state
        remaining = GaugeMetricFamily("sluice_drain_remaining", "What a drain still waits for.", labels=["kind"])
        leaving = runtime.status.leaving
        remaining.add_metric(["exchanges"], len(runtime.exchanges) if leaving else 0)
        remaining.add_metric(["seconds"], (runtime.status.seconds_left() or 0.0) if leaving else 0.0)
        yield remaining
        if not runtime.started():
            return
        gateway = runtime.gateway()
        yield counter("sluice_settle_retries", "Settle scripts that were repeated.", gateway.settler.retries)
        yield counter("sluice_redis_errors", "Round trips to Redis that failed.", gateway.redis.errors)
        reaped = CounterMetricFamily("sluice_reaped", "What this server's reaper found.", labels=["kind"])
        failovers = CounterMetricFamily("sluice_failovers", "Requests taken from a lost worker.", labels=["result"])
        for kind in ("server", "server_detached", "worker", "worker_requeued", "deadline", "grace", "index"):
            reaped.add_metric([kind], gateway.reaper.reaped[kind])
        failovers.add_metric(["continued"], gateway.reaper.reaped["worker_requeued"])
        failovers.add_metric(["failed"], gateway.reaper.reaped["worker"])
        yield reaped
        yield failovers


STATS = {
    "running": "Sequences that the engines are computing.",
    "waiting": "Sequences that the engines hold and have not begun.",
    "slots": "Sequences that the engines can run at once.",
    "blocks_total": "",
    "blocks_used": "",
    "blocks_cached": "",
}


def gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family


_live = LiveCollector()
_registered = False
_scrape = asyncio.Lock()


async def exposition() -> tuple[bytes, str]:
    """The text of a scrape and its content type. One at a time; the text is made off the loop."""
    global _registered
    async with _scrape:
        if not _registered:
            REGISTRY.register(_live)
            _registered = True
        _live.snapshot = await Snapshot.take(runtime.gateway()) if runtime.started() else Snapshot()
        return await runtime.offload(_text), CONTENT_TYPE_LATEST


def _text() -> bytes:
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(REGISTRY)
    # Several processes of this host count into files; gauges are still read as above.
    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged)
    merged.register(_live)
    return generate_latest(merged)


def hooks() -> dict[str, Any]:
    """What a :class:`~inference.gateway.Gateway` is to call."""
    return {"on_accepted": accepted, "on_ending": ended, "on_stream": read}
