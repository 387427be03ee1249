"""Counters and histograms of Sluice, fed where things happen.

They are fed by endings: the process that settles a request - exactly one does -
observes its summary, whose times are all of one clock. Gauges are not here; they
are read at the scrape from what is in flight (``sluice.metrics``).

Where ``PROMETHEUS_MULTIPROC_DIR`` was set before this module was imported, every
process of a tree counts into files of its own there, and whichever is scraped
adds them up.

Labels come from closed sets: configured aliases, endpoints, outcomes. A name that
a client made up counts as ``other``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from inference.messages import Ending, EngineStats

if TYPE_CHECKING:
    from inference.gateway.stream import RequestStream
    from inference.store.records import Submission

#: OpenTelemetry's buckets for the time to a first token, for the time per token, and for a whole
#: request, each extended to where a slow machine or a full queue gets.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                300, 600)  # fmt: skip
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 30,
               60)  # fmt: skip
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 160, 300,
                    600)  # fmt: skip
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

ENDPOINTS = frozenset({"chat", "completions", "generate", "ws", "responses", "embeddings", "chat-ui"})
TRANSPORTS = frozenset({"sse", "json", "ws"})
OTHER = "other"
REAPED_KINDS = ("server", "server_detached", "worker", "worker_requeued", "deadline", "grace", "index")

#: Observations put into a histogram before the event loop gets its turn again.
_CHUNK = 500
#: Of more engine steps at once than this, the rest is not observed.
_MAX_STEPS = 64

#: Every metric below: name as scraped -> (type, text, labels). The page of the metrics is made from it.
DEFINED: dict[str, tuple[str, str, tuple[str, ...]]] = {}


def _counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    DEFINED[f"{name}_total"] = ("counter", text, tuple(labels))
    return Counter(name, text, labels)


def _histogram(name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
    DEFINED[name] = ("histogram", text, tuple(labels))
    return Histogram(name, text, labels, buckets=buckets)


STARTED = _counter("sluice_requests_started", "Requests accepted into the queue.", ["endpoint", "transport", "model"])
REQUESTS = _counter(
    "sluice_requests",
    "Requests that have ended, by how. The sum over outcomes is what was started and is not in flight.",
    ["endpoint", "transport", "model", "outcome", "reason"],
)
REFUSED = _counter(
    "sluice_requests_refused",
    "Requests turned away on their way into the queue: no worker, too long, queue full, no Redis.",
    ["model", "reason"],
)
STREAMS = _counter(
    "sluice_streams",
    "Streams whose reader is done, by how the stream itself ended, whatever its HTTP status was.",
    ["outcome"],
)
TTFT = _histogram(
    "sluice_time_to_first_token_seconds",
    "From acceptance, queue included, to the first token; once per request that produced one.",
    ["model"],
    buckets=TTFT_BUCKETS,
)
ITL = _histogram(
    "sluice_inter_token_latency_seconds",
    "Between consecutive tokens of a request as they reached its server; one fewer than tokens.",
    ["model"],
    buckets=ITL_BUCKETS,
)
DURATION = _histogram(
    "sluice_request_duration_seconds", "From acceptance to the end.", ["model", "outcome"], buckets=DURATION_BUCKETS
)
QUEUE_WAIT = _histogram(
    "sluice_queue_wait_seconds", "From acceptance to the first claim by a worker.", ["model"], buckets=TTFT_BUCKETS
)
STEP = _histogram(
    "sluice_step_duration_seconds", "Engine steps, as their worker saw them.", ["model"], buckets=STEP_BUCKETS
)
PROMPT_TOKENS = _counter("sluice_prompt_tokens", "Prompt tokens of ended requests.", ["model"])
GENERATED_TOKENS = _counter("sluice_generated_tokens", "Generated tokens of ended requests.", ["model"])
CACHED_TOKENS = _counter("sluice_cached_prompt_tokens", "Prompt tokens found in a worker's prefix cache.", ["model"])
SETTLE_RETRIES = _counter("sluice_settle_retries", "Settle scripts that were repeated because Redis did not answer.")
REDIS_ERRORS = _counter("sluice_redis_errors", "Round trips to Redis that failed.")
REAPED = _counter("sluice_reaped", "What reapers ended or put back, by what had gone wrong.", ["kind"])
FAILOVERS = _counter("sluice_failovers", "Requests taken from a lost worker, by what became of them.", ["result"])
SEND_PAUSED = _counter("sluice_send_paused_seconds", "Time that handlers waited for clients who did not read.")
SLOW_CLIENTS = _counter("sluice_slow_clients", "Connections that were cut because their client did not read.")
DEAD_PEERS = _counter("sluice_dead_peers", "WebSockets that were dropped because their client answered no ping.")

_aliases: set[str] = set()


def know(aliases: Iterable[str]) -> None:
    """Let these configured aliases be label values; what has no other labels is there, at 0, from now on."""
    for alias in aliases:
        _aliases.add(alias)
        for counter in (PROMPT_TOKENS, GENERATED_TOKENS, CACHED_TOKENS):
            counter.labels(alias)
    for kind in REAPED_KINDS:
        REAPED.labels(kind)
    for result in ("continued", "failed"):
        FAILOVERS.labels(result)


def model_label(alias: str) -> str:
    """The alias where it is a configured one, else ``other``."""
    return alias if alias in _aliases else OTHER


def _closed(value: str, allowed: frozenset[str]) -> str:
    return value if value in allowed else OTHER


def accepted(spec: Submission) -> None:
    """A request was stored."""
    STARTED.labels(
        _closed(spec.endpoint, ENDPOINTS), _closed(spec.transport, TRANSPORTS), model_label(spec.job.model)
    ).inc()


def refused(model: str, reason: str) -> None:
    """A request was turned away; ``reason`` is one of our exceptions' names."""
    REFUSED.labels(model_label(model), reason).inc()


def ended(ending: Ending) -> None:
    """This process settled a request."""
    model = model_label(ending.model)
    REQUESTS.labels(
        _closed(ending.endpoint, ENDPOINTS), _closed(ending.transport, TRANSPORTS), model, ending.state, ending.reason
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
    model = model_label(stream.job.model) if stream.job is not None else OTHER
    if stream.cached:
        CACHED_TOKENS.labels(model).inc(stream.cached)
    if len(stream.gaps):
        _file(ITL.labels(model), stream.gaps)


def _file(histogram: Histogram, gaps: Sequence[float], start: int = 0) -> None:
    # Not on the per-token path, and never long enough at a time to be felt there.
    for gap in gaps[start : start + _CHUNK]:
        histogram.observe(gap)
    if start + _CHUNK < len(gaps):
        asyncio.get_running_loop().call_soon(_file, histogram, gaps, start + _CHUNK)


class StepClock:
    """Observes the engine steps of one model out of successive snapshots of its engine."""

    def __init__(self, alias: str) -> None:
        self._histogram = STEP.labels(model_label(alias))
        self._steps = 0
        self._seconds = 0.0

    def tick(self, stats: EngineStats) -> None:
        """Take what has happened since the last snapshot; several steps count with their mean."""
        steps, seconds = stats.steps - self._steps, stats.step_seconds - self._seconds
        self._steps, self._seconds = stats.steps, stats.step_seconds
        if steps > 0 and seconds >= 0:
            for _ in range(min(steps, _MAX_STEPS)):
                self._histogram.observe(seconds / steps)


def reaped(kind: str) -> None:
    """A reaper has dealt with one request."""
    REAPED.labels(kind).inc()
    if kind == "worker_requeued":
        FAILOVERS.labels("continued").inc()
    elif kind == "worker":
        FAILOVERS.labels("failed").inc()
