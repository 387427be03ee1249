"""The metrics, through a gateway and worker on a real Valkey."""

from __future__ import annotations

import re

import pytest
from prometheus_client import REGISTRY

from inference.gateway import Gateway
from sluice import metrics, runtime
from tests.core.conftest import Deploy, deploy, read, spec  # noqa: F401
from tests.support import eventually


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def total(name: str) -> float:
    return sum(s.value for m in REGISTRY.collect() for s in m.samples if s.name == name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, make_config):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(runtime, "_config", make_config())
    names = ("sluice_requests_started_total", "sluice_requests_total", "sluice_time_to_first_token_seconds_count",
             "sluice_inter_token_latency_seconds_count", "sluice_generated_tokens_total")  # fmt: skip
    before = {n: total(n) for n in names}
    return lambda name: total(name) - before[name]


async def gateway_with_metrics(deployment) -> Gateway:  # type: ignore[no-untyped-def]
    await deployment.worker()
    hooks = metrics.hooks()
    ending = hooks.pop("on_ending")
    gateway = Gateway(deployment.config, on_ending=lambda e: (deployment.endings.append(e), ending(e)), **hooks)
    await deployment._stack.enter_async_context(gateway)
    await eventually(lambda: gateway.models())
    return gateway


async def test_started_is_the_sum_of_outcomes(deploy: Deploy, counted) -> None:  # type: ignore[no-untyped-def]
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    for _ in range(3):
        async with gateway.request(spec(5)) as stream:
            await read(stream)
    async with gateway.request(spec(4000)) as stream:
        await stream.next()
    await deployment.clean(gateway)
    assert counted("sluice_requests_started_total") == 4
    assert counted("sluice_requests_total") == 4
    assert value(
        "sluice_requests_total",
        endpoint="chat", transport="sse", model="scripted", outcome="cancelled", reason="client_gone",
    ) >= 1  # fmt: skip


async def test_ttft_once_per_request_and_itl_one_fewer_than_tokens(deploy: Deploy, counted) -> None:  # type: ignore[no-untyped-def]
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    for tokens in (1, 2, 9):
        async with gateway.request(spec(tokens)) as stream:
            await read(stream)
    assert counted("sluice_time_to_first_token_seconds_count") == 3
    assert counted("sluice_generated_tokens_total") == 12
    assert counted("sluice_inter_token_latency_seconds_count") == 12 - 3


async def test_made_up_names_collapse(counted) -> None:  # type: ignore[no-untyped-def]
    series = sum(1 for m in REGISTRY.collect() for _ in m.samples)
    for i in range(50):
        metrics.accepted(spec(1, endpoint=f"e{i}", transport=f"t{i}"))
    after = sum(1 for m in REGISTRY.collect() for _ in m.samples)
    assert after - series <= 2


async def test_the_exposition_reads_what_is_in_flight(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    with runtime.replaced(gateway):
        async with gateway.request(spec(4000)) as stream:
            await stream.next()
            text, _ = await metrics.exposition()
            assert gauge(text, 'sluice_requests_inflight{model="scripted",state="running"}') == 1
            assert gauge(text, 'sluice_worker_up{state="ready"}') == 1
        await deployment.clean(gateway)
        text, _ = await metrics.exposition()
        assert gauge(text, 'sluice_requests_inflight{model="scripted",state="running"}') == 0
        assert gauge(text, 'sluice_requests_inflight{model="scripted",state="queued"}') == 0


def gauge(text: bytes, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text.decode(), re.M)
    assert found, series
    return float(found[1])
