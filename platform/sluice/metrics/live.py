"""Gauges: read, at the scrape, from what is really in flight.

None is kept, and none is made up: what only Redis knows is left out of a scrape that
it does not answer (``sluice_redis_up`` says so), not shown as 0. Each comes from this
process's own state, the queue, or a heartbeat that expires with its process, so that
a killed process leaves nothing behind in them. All describe the whole deployment,
whichever server is asked: aggregate them over servers with ``max``, not ``sum``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inference.errors import SluiceError
from inference.gateway import Gateway
from inference.messages import ServerBeat, WorkerBeat
from sluice import runtime

WORKER_STATES = ("starting", "ready", "quiet", "draining")
SERVER_STATES = ("serving", "pausing", "refusing", "finishing", "ending")
#: Seconds that Redis has to answer a scrape.
PATIENCE = 2.0

#: Name, text and labels of every gauge (and of the one counter that pools keep). The page
#: of the metrics is made from this, and a scrape makes nothing that is not in it.
LIVE: dict[str, tuple[str, tuple[str, ...]]] = {
    "sluice_requests_inflight": ("Requests not yet ended.", ("state", "model")),
    "sluice_queue_depth": ("Requests waiting for a worker.", ("model", "priority")),
    "sluice_requests_detached": ("Resumable requests that nobody reads now.", ()),
    "sluice_oldest_inflight_age_seconds": ("Age of the oldest request in flight.", ()),
    "sluice_http_exchanges_inflight": (
        "HTTP and WebSocket exchanges from their first byte to their last, over all servers.",
        ("route", "kind"),
    ),
    "sluice_worker_up": ("Workers with a heartbeat, by what they are doing.", ("state",)),
    "sluice_worker_restarts_total": (
        "Workers that pools have replaced; kept in Redis, so that it outlives the pools.",
        (),
    ),
    "sluice_engine_running": ("Sequences that the engines are computing.", ()),
    "sluice_engine_waiting": ("Sequences that the engines hold and have not begun.", ()),
    "sluice_engine_slots": ("Sequences that the engines can run at once.", ()),
    "sluice_kv_blocks": ("KV cache blocks of all workers: used, kept for sharing, and in all.", ("state",)),
    "sluice_redis_up": ("Whether Redis answered this scrape.", ()),
    "sluice_event_loop_lag_seconds": ("Worst lag of any server's event loop in the last ten seconds.", ()),
    "sluice_drain_state": ("Servers by their state.", ("state",)),
    "sluice_drain_remaining": ("What drains wait for: open exchanges, and seconds to the deadline.", ("kind",)),
    "sluice_process_resident_bytes": ("Memory of all processes of a kind.", ("role",)),
}


class Snapshot(msgspec.Struct):
    """What is in flight now, for one scrape. Without ``redis_up`` nothing else in it means anything."""

    queued: dict[str, dict[str, int]] = {}
    running: dict[str, int] = {}
    detached: int = 0
    oldest_age: float = 0.0
    restarts: int = 0
    workers: list[WorkerBeat] = []
    servers: list[ServerBeat] = []
    redis_up: bool = False

    @classmethod
    async def take(cls, gateway: Gateway) -> Snapshot:
        """Ask Redis once; where it does not answer, nothing is known."""
        try:
            async with asyncio.timeout(PATIENCE):
                return await cls._ask(gateway)
        except (SluiceError, TimeoutError):
            return cls()

    @classmethod
    async def _ask(cls, gateway: Gateway) -> Snapshot:
        aliases, views = gateway.aliases, gateway.views
        queued, running, detached, oldest, restarts, workers, servers = await asyncio.gather(
            asyncio.gather(*(views.queued_by_priority(a) for a in aliases)),
            asyncio.gather(*(views.running(a) for a in aliases)),
            views.detached(),
            views.oldest_age(),
            views.restarts(),
            gateway.workers(),
            gateway.servers(),
        )
        return cls(
            dict(zip(aliases, queued, strict=True)),
            dict(zip(aliases, running, strict=True)),
            detached,
            oldest,
            restarts,
            workers,
            servers,
            True,
        )


class LiveCollector:
    """Turns the latest snapshot and this process's own state into gauges."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if self.snapshot.redis_up:
            yield from self._requests()
            yield from self._workers()
        yield from self._servers()

    def _requests(self) -> Iterator[Metric]:
        s = self.snapshot
        inflight, depth = family("sluice_requests_inflight"), family("sluice_queue_depth")
        for model, classes in s.queued.items():
            inflight.add_metric(["queued", model], sum(classes.values()))
            for priority, count in classes.items():
                depth.add_metric([model, priority], count)
        for model, count in s.running.items():
            inflight.add_metric(["running", model], count)
        yield inflight
        yield depth
        yield single("sluice_requests_detached", s.detached)
        yield single("sluice_oldest_inflight_age_seconds", s.oldest_age)

    def _workers(self) -> Iterator[Metric]:
        workers = self.snapshot.workers
        up = family("sluice_worker_up")
        for state in WORKER_STATES:
            up.add_metric([state], sum(w.state == state for w in workers))
        yield up
        yield single("sluice_worker_restarts_total", self.snapshot.restarts)
        for name in ("running", "waiting", "slots"):
            yield single(f"sluice_engine_{name}", sum(getattr(w.stats, name) for w in workers))
        blocks = family("sluice_kv_blocks")
        for state in ("used", "cached", "total"):
            blocks.add_metric([state], sum(getattr(w.stats, f"blocks_{state}") for w in workers))
        yield blocks

    def _servers(self) -> Iterator[Metric]:
        servers = [*self._others(), self._own()]
        yield single("sluice_redis_up", int(self.snapshot.redis_up))
        yield single("sluice_event_loop_lag_seconds", max(s.loop_lag_seconds for s in servers))
        states = family("sluice_drain_state")
        for state in SERVER_STATES:
            states.add_metric([state], sum(s.state == state for s in servers))
        yield states
        leaving = [s for s in servers if s.state != "serving"]
        remaining = family("sluice_drain_remaining")
        remaining.add_metric(["exchanges"], sum(sum(s.exchanges.values()) for s in leaving))
        remaining.add_metric(["seconds"], max((s.drain_left_seconds or 0.0 for s in leaving), default=0.0))
        yield remaining
        yield self._exchanges(servers)
        memory = family("sluice_process_resident_bytes")
        memory.add_metric(["server"], sum(s.rss_bytes for s in servers))
        if self.snapshot.redis_up:
            memory.add_metric(["worker"], sum(w.rss_bytes for w in self.snapshot.workers))
        yield memory

    @staticmethod
    def _exchanges(servers: list[ServerBeat]) -> Metric:
        counts: dict[tuple[str, str], int] = {}
        for server in servers:
            for name, count in server.exchanges.items():
                kind, _, route = name.partition(" ")
                counts[route, kind] = counts.get((route, kind), 0) + count
        exchanges = family("sluice_http_exchanges_inflight")
        for (route, kind), count in sorted(counts.items()):
            exchanges.add_metric([route, kind], count)
        return exchanges

    def _others(self) -> list[ServerBeat]:
        own = runtime.gateway().id if runtime.started() else ""
        return [s for s in self.snapshot.servers if s.id != own]

    @staticmethod
    def _own() -> ServerBeat:
        """This process as it is now, and not as its last heartbeat said."""
        return ServerBeat(
            id="", host="", pid=0, streams=0, unsettled=0, started_ms=0, version="", **runtime.beat()
        )  # fmt: skip


def family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    """An empty family of :data:`LIVE`."""
    text, labels = LIVE[name]
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, text, labels=labels)


def single(name: str, value: float) -> Metric:
    """A family of one sample without labels."""
    found = family(name)
    found.add_metric([], value)
    return found
