"""Traces, read back from the SDK's in-memory exporter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install -r requirements-otel.txt")

from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from inference import tracing
from inference.errors import ConfigError
from sluice.exchanges import ExchangeMiddleware, ExchangeRegistry
from tests.conftest import ROOT
from tests.core.conftest import Deploy, deploy, read, spec  # noqa: F401
from tests.support import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [s for s in exporter.get_finished_spans() if s.name == name]


async def test_server_queue_and_worker_are_one_trace(deploy: Deploy, spans: InMemorySpanExporter) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    token = tracing.parent.set(PARENT)
    async with gateway.request(spec(6, temperature=0.5, seed=3, prompt="a secret prompt", stop=["secret"])) as stream:
        frames = await read(stream)
    tracing.parent.reset(token)
    await deployment.clean(gateway)
    (request,), (queue,), (work,) = [await eventually(lambda n=n: named(spans, n)) for n in NAMES]
    assert {s.context.trace_id for s in (request, queue, work)} == {int(TRACE, 16)}
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert queue.parent.span_id == request.context.span_id
    assert work.parent.span_id == queue.context.span_id
    assert (request.kind, queue.kind, work.kind) == (SpanKind.SERVER, SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.request.model"] == "scripted"
    assert request.attributes["gen_ai.request.temperature"] == 0.5
    assert request.attributes["gen_ai.request.seed"] == 3
    assert request.attributes["gen_ai.usage.input_tokens"] == len("a secret prompt")
    for span in (request, work):
        assert span.attributes["gen_ai.usage.output_tokens"] == 6
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert span.status.status_code is StatusCode.UNSET
    assert request.start_time <= queue.end_time <= request.end_time
    (first,) = request.events
    assert queue.end_time <= first.timestamp
    everything = " ".join(s.to_json() for s in spans.get_finished_spans())
    assert "secret" not in everything
    assert "".join(f.text for f in frames) not in everything


NAMES = ("chat scripted", "queue scripted", "generate scripted")


async def test_a_cancelled_request_closes_its_spans(deploy: Deploy, spans: InMemorySpanExporter) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    async with gateway.request(spec(4000)) as stream:
        await stream.next()
    await deployment.clean(gateway)
    for name in NAMES:
        await eventually(lambda name=name: named(spans, name))
    (request,) = named(spans, "chat scripted")
    assert (request.attributes["sluice.outcome"], request.attributes["sluice.reason"]) == ("cancelled", "client_gone")
    assert request.parent is None
    (work,) = named(spans, "generate scripted")
    assert "gen_ai.response.finish_reasons" not in work.attributes


async def test_a_failed_request_is_an_error(deploy: Deploy, spans: InMemorySpanExporter) -> None:
    deployment = deploy(models="scripted=scripted:rate=200,faults=1")
    gateway, _ = await deployment.both()
    async with gateway.request(spec(50, prompt="[[error@3]]")) as stream:
        await read(stream)
    await deployment.clean(gateway)
    for name in ("chat scripted", "generate scripted"):
        (span,) = await eventually(lambda name=name: named(spans, name))
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["error.type"] == "engine_error"


class Opened(SpanProcessor):
    """The names of all spans that were begun, ended or not."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        self.names.append(span.name)


async def test_a_request_that_is_refused_leaves_no_open_span(deploy: Deploy, spans: InMemorySpanExporter) -> None:
    opened, provider = Opened(), TracerProvider()
    provider.add_span_processor(opened)
    tracing.use(provider)
    deployment = deploy()
    gateway = await deployment.gateway()
    with pytest.raises(Exception, match="No worker"):
        async with gateway.request(spec(5)):
            pass
    assert opened.names == []


async def test_the_traceparent_header_reaches_the_request(spans: InMemorySpanExporter) -> None:
    seen = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        seen.append(tracing.parent.get())

    middleware = ExchangeMiddleware(app, ExchangeRegistry(), lambda scope: "/x")
    scope = {"type": "http", "headers": [(b"traceparent", PARENT.encode())]}
    await middleware(scope, None, None)  # type: ignore[arg-type]
    assert seen == [PARENT]


async def test_off_by_default_and_nothing_is_sent_along(deploy: Deploy) -> None:
    assert not tracing.active()
    before = spec(3)
    _, after = tracing.begin(before)
    assert after is before
    assert after.job.trace is None


@pytest.mark.parametrize(
    ("environ", "exporter"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ""),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_standard_variables_switch_it_on(environ: dict[str, str], exporter: str) -> None:
    assert tracing.wanted(environ) == exporter


def test_an_unknown_exporter_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER must be otlp, console or none"):
        tracing.wanted({"OTEL_TRACES_EXPORTER": "zipkin"})


def test_without_the_packages_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from inference import tracing\n"
        "tracing.configure('x')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OTEL_TRACES_EXPORTER": "console"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert "ConfigError: traces are asked for (OTEL_...)" in done.stderr
    assert "pip install -r requirements-otel.txt" in done.stderr
