"""Traces of requests, with OpenTelemetry where it is installed and asked for.

One trace per request: the server's span, in it the time in the queue, and in that
the worker's span, in another process. Its context travels in :attr:`Job.trace` as a
W3C ``traceparent``. Spans carry names, figures and outcomes by the conventions for
generative AI, and never a prompt or an answer.

Off (the default) it costs one attribute look-up per request. It is on where
``OTEL_TRACES_EXPORTER`` is ``otlp`` or ``console``, or an OTLP endpoint is set.
"""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from inference import logs
from inference.errors import ConfigError
from inference.lifecycle import State
from inference.messages import Ending, Job

if TYPE_CHECKING:
    from inference.gateway.stream import RequestStream
    from inference.store.records import Claim, Submission

#: The ``traceparent`` header of the exchange that this task serves; empty without one.
parent: ContextVar[str] = ContextVar("traceparent", default="")

OPERATIONS = {"chat": "chat", "ws": "chat", "chat-ui": "chat", "responses": "chat", "embeddings": "embeddings"}
PROVIDER = "sluice"

_tracer: Any = None
_provider: Any = None


def wanted(environ: Any = os.environ) -> str:
    """The exporter that the standard variables ask for: ``otlp``, ``console`` or nothing.

    Raises:
        ConfigError: they ask for another one.
    """
    exporter = str(environ.get("OTEL_TRACES_EXPORTER", "")).strip().lower()
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return ""
    if not exporter:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        return "otlp" if any(environ.get(name) for name in endpoints) else ""
    if exporter not in ("otlp", "console"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER must be otlp, console or none, not {exporter!r}")
    return exporter


def configure(service: str) -> None:
    """Switch tracing on in this process where the environment asks for it.

    Raises:
        ConfigError: it does, but OpenTelemetry is not installed.
    """
    exporter = wanted()
    if not exporter or _tracer is not None:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        if exporter == "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found,unused-ignore]
                OTLPSpanExporter,
            )

            target: Any = OTLPSpanExporter()
        else:
            target = ConsoleSpanExporter()
    except ImportError as exc:
        raise ConfigError(
            f"traces are asked for (OTEL_...), but {exc.name} is not installed: pip install -r requirements-otel.txt"
        ) from exc
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}))
    provider.add_span_processor(BatchSpanProcessor(target))
    use(provider)


def use(provider: Any) -> None:
    """Make spans with this ``TracerProvider``; ``None`` switches tracing off."""
    global _tracer, _provider
    _provider = provider
    _tracer = None if provider is None else provider.get_tracer("sluice")


def active() -> bool:
    """Whether spans are made."""
    return _tracer is not None


def shutdown() -> None:
    """Send what is left; may take seconds where the collector does not answer."""
    if _provider is not None:
        _provider.shutdown()
        use(None)


class RequestTrace:
    """What is kept of a request beside its stream: how it came, and by which exchange."""

    __slots__ = ("exchange", "spec")

    def __init__(self, spec: Submission) -> None:
        self.spec = spec
        exchange = logs.request_id.get()
        self.exchange = "" if exchange == "-" else exchange

    def read(self, stream: RequestStream) -> None:
        """Its reader is done."""

    def end(self, ending: Ending | None) -> None:
        """It was settled here (``ending``), or elsewhere, or not at all. Only the first call counts."""


class WorkTrace:
    """A request in a worker, while tracing is off."""

    def end(self, *, tokens: int, finish: str | None) -> None:
        """The worker is done with it; ``finish`` is ``None`` where it was taken away."""


_NO_WORK = WorkTrace()


def begin(spec: Submission) -> tuple[RequestTrace, Submission]:
    """Start to follow a request; gives the submission with the context that its worker goes on from."""
    if _tracer is None:
        return RequestTrace(spec), spec
    trace = _RequestSpans(spec)
    return trace, msgspec.structs.replace(spec, job=msgspec.structs.replace(spec.job, trace=trace.traceparent))


def work(claim: Claim, worker: str) -> WorkTrace:
    """Follow a claimed request in its worker."""
    return _NO_WORK if _tracer is None else _WorkSpan(claim, worker)


class _RequestSpans(RequestTrace):
    __slots__ = ("_began", "_outcome", "_queue", "_span", "_tokens", "traceparent")

    def __init__(self, spec: Submission) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        super().__init__(spec)
        operation = OPERATIONS.get(spec.endpoint, "text_completion")
        self._began = time.time_ns()
        self._tokens = 0
        self._outcome: Any = None
        self._span = _tracer.start_span(
            f"{operation} {spec.job.model}",
            context=_context(parent.get()),
            kind=SpanKind.SERVER,
            start_time=self._began,
            attributes={
                **_request(spec.job, operation),
                "sluice.endpoint": spec.endpoint,
                "sluice.transport": spec.transport,
                "sluice.priority": spec.priority,
                "sluice.exchange.id": self.exchange,
            },
        )
        self._queue = _tracer.start_span(
            f"queue {spec.job.model}",
            context=set_span_in_context(self._span),
            kind=SpanKind.PRODUCER,
            start_time=self._began,
        )
        self.traceparent = _traceparent(self._queue)

    def read(self, stream: RequestStream) -> None:
        self._tokens = stream.tokens
        self._outcome = stream.outcome or getattr(stream.ended, "outcome", None)
        if stream.cached:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", stream.cached)

    def end(self, ending: Ending | None) -> None:
        if not self._span.is_recording():
            return
        if ending is None:
            state, reason = (self._outcome.state, self._outcome.reason) if self._outcome else ("", "")
            self._queue.end()
        else:
            state, reason = ending.state, ending.reason
            self._tokens = ending.generated_tokens
            self._queue.end(self._at(ending, ending.claimed_ms or ending.ended_ms))
            self._span.set_attribute("sluice.attempts", ending.attempts)
            if ending.first_token_ms:
                self._span.add_event("first token", timestamp=self._at(ending, ending.first_token_ms))
        self._span.set_attribute("gen_ai.usage.output_tokens", self._tokens)
        _close(self._span, str(state), str(reason))

    def _at(self, ending: Ending, ms: int) -> int:
        # Times of the Redis clock, laid from where this span began.
        return self._began + max(0, ms - ending.created_ms) * 1_000_000


class _WorkSpan(WorkTrace):
    def __init__(self, claim: Claim, worker: str) -> None:
        from opentelemetry.trace import SpanKind

        self._span = _tracer.start_span(
            f"generate {claim.job.model}",
            context=_context(claim.job.trace or ""),
            kind=SpanKind.CONSUMER,
            attributes={
                **_request(claim.job, "generate_content"),
                "sluice.worker.id": worker,
                "sluice.attempt": claim.attempt,
            },
        )

    def end(self, *, tokens: int, finish: str | None) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attribute("gen_ai.usage.output_tokens", tokens)
        if finish == "error":
            _close(self._span, State.FAILED, "engine_error")
        elif finish is not None:
            _close(self._span, State.FINISHED, finish)
        else:
            _close(self._span, "", "")


def _request(job: Job, operation: str) -> dict[str, Any]:
    params = job.params
    found = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": job.model,
        "gen_ai.response.model": job.model,
        "gen_ai.response.id": job.id,
        "gen_ai.usage.input_tokens": len(job.prompt_ids),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    if params.top_k:
        found["gen_ai.request.top_k"] = params.top_k
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    return found


def _close(span: Any, state: str, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    if state:
        span.set_attribute("sluice.outcome", state)
        span.set_attribute("sluice.reason", reason)
    if state == State.FINISHED:
        span.set_attribute("gen_ai.response.finish_reasons", [reason])
    elif state == State.FAILED:
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _context(traceparent: str) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent} if traceparent else {})


def _traceparent(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
