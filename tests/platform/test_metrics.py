"""The metrics, through a gateway and worker on a real Valkey."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from inference import metrics as counted_here
from inference import multiproc
from inference.embedded import EmbeddedValkey
from inference.errors import StoreUnavailable
from inference.gateway import Gateway, RequestEnded
from inference.lifecycle import Outcome, Reason
from inference.redisio import Script
from inference.store import RequestStore
from inference.store.store import SETTLE, SUBMIT
from sluice import metrics, runtime
from sluice.metrics import live, reference
from sluice.metrics.live import LIVE
from tests.conftest import ROOT
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
            assert 0 < gauge(text, "sluice_oldest_inflight_age_seconds") < 60
        await deployment.clean(gateway)
        text, _ = await metrics.exposition()
        assert gauge(text, 'sluice_requests_inflight{model="scripted",state="running"}') == 0
        assert gauge(text, 'sluice_requests_inflight{model="scripted",state="queued"}') == 0
        assert gauge(text, "sluice_oldest_inflight_age_seconds") == 0


async def test_what_redis_does_not_say_is_left_out(
    deploy: Deploy, fresh_valkey: Callable[[], EmbeddedValkey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gauge says 0 of what is not known; what this process knows by itself is still there."""
    valkey = fresh_valkey()
    monkeypatch.setattr(live, "PATIENCE", 0.3)
    deployment = deploy(redis_url=valkey.url)
    gateway = await gateway_with_metrics(deployment)
    with runtime.replaced(gateway):
        os.kill(valkey.pid, signal.SIGSTOP)
        try:
            text, _ = await metrics.exposition()
        finally:
            os.kill(valkey.pid, signal.SIGCONT)
        assert gauge(text, "sluice_redis_up") == 0
        assert gauge(text, 'sluice_drain_state{state="serving"}') == 1
        for name in ("sluice_requests_inflight", "sluice_worker_up", "sluice_worker_restarts_total"):
            assert f"\n{name}".encode() not in text


def gauge(text: bytes, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text.decode(), re.M)
    assert found, series
    return float(found[1])


# -- replies that are lost -----------------------------------------------------------------------------


def lose_reply(monkeypatch: pytest.MonkeyPatch, gateway: Gateway, which: Script) -> list[str]:
    """The next call of a script is carried out, but its reply never arrives."""
    real, lost = gateway.redis.script, []

    def script(called: Script, keys: Any, args: Any) -> asyncio.Future[Any]:
        reply = real(called, keys, args)
        if called is not which or lost:
            return reply
        lost.append(called.name)
        broken = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda _: broken.set_exception(StoreUnavailable("lost")))
        return broken

    monkeypatch.setattr(gateway.redis, "script", script)
    return lost


async def test_an_ending_whose_reply_was_lost_counts_once(deploy: Deploy, counted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    retries = total("sluice_settle_retries_total")
    lost = lose_reply(monkeypatch, gateway, SETTLE)
    async with gateway.request(spec(5)) as stream:
        await read(stream)
    await eventually(lambda: counted("sluice_requests_total") == 1)
    assert lost == ["settle"]
    assert total("sluice_settle_retries_total") == retries + 1
    async with gateway.request(spec(5)) as stream:
        await read(stream)
    await deployment.clean(gateway)
    assert counted("sluice_requests_total") == counted("sluice_requests_started_total") == 2
    assert [e.reason for e in deployment.endings] == ["length", "length"]


async def test_a_submit_whose_reply_was_lost_counts_as_started(deploy: Deploy, counted, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    lost = lose_reply(monkeypatch, gateway, SUBMIT)
    with pytest.raises(StoreUnavailable):
        async with gateway.request(spec(500)):
            pass
    assert lost == ["submit"]
    await eventually(lambda: counted("sluice_requests_total") == 1)
    assert counted("sluice_requests_started_total") == 1


async def test_what_redis_has_lost_ends_once_where_it_was_read(deploy: Deploy, counted, redis) -> None:  # type: ignore[no-untyped-def]
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    with pytest.raises(RequestEnded):
        async with gateway.request(spec(4000)) as stream:
            await stream.next()
            await redis.flushall()
            await read(stream)
    await eventually(lambda: counted("sluice_requests_total") == 1)
    assert (deployment.endings[-1].state, deployment.endings[-1].reason) == ("failed", "state_lost")
    assert counted("sluice_requests_started_total") == 1
    assert counted("sluice_time_to_first_token_seconds_count") == 1


async def test_what_a_process_without_metrics_ends_is_counted_by_the_server(deploy: Deploy, counted) -> None:  # type: ignore[no-untyped-def]
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    store = RequestStore(gateway.redis, deployment.config, counts=False)  # as manage.py inflight --cancel
    with pytest.raises(Exception, match="operator"):
        async with gateway.request(spec(4000)) as stream:
            await stream.next()
            assert await store.settle(stream.id, Outcome.cancelled(Reason.ADMIN)) is not None
            await read(stream)
    await eventually(lambda: counted("sluice_requests_total") == 1)
    assert deployment.endings[-1].reason == "admin"


async def test_refusals_have_their_reason(deploy: Deploy) -> None:
    deployment = deploy()
    gateway = await deployment.gateway()
    before = value("sluice_requests_refused_total", model="scripted", reason="not_serving")
    with pytest.raises(Exception, match="No worker"):
        async with gateway.request(spec(5)):
            pass
    assert value("sluice_requests_refused_total", model="scripted", reason="not_serving") == before + 1


async def test_a_request_that_ends_without_a_reader_is_counted_by_its_worker(deploy: Deploy, counted) -> None:  # type: ignore[no-untyped-def]
    deployment = deploy()
    gateway = await gateway_with_metrics(deployment)
    request = spec(60, resumable=True)
    begun = asyncio.Event()

    async def reader() -> None:
        async with gateway.request(request) as stream:
            await stream.next()
            begun.set()
            await read(stream)

    task = asyncio.create_task(reader())
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: counted("sluice_requests_total") == 1)
    assert counted("sluice_requests_started_total") == 1
    assert deployment.endings == []  # not the server's
    gaps = counted("sluice_inter_token_latency_seconds_count")
    async with gateway.attach(request.job.id) as stream:
        frames = await read(stream)
    assert sum(len(f.ids) for f in frames) == 60
    assert counted("sluice_inter_token_latency_seconds_count") == gaps  # read from the log: measured by nobody twice


# -- several processes ---------------------------------------------------------------------------------

COUNT = """
import sys
from inference import metrics
metrics.know(["m"])
metrics.REAPED.labels("deadline").inc(int(sys.argv[1]))
metrics.TTFT.labels("m").observe(0.3)
"""


def count_in_a_process(folder: Path, number: int) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", multiproc.VARIABLE: str(folder)}
    subprocess.run([sys.executable, "-c", COUNT, str(number)], env=env, check=True, timeout=60)


def test_the_dead_are_added_up_into_one_file(tmp_path: Path) -> None:
    for number in (3, 4):
        count_in_a_process(tmp_path, number)
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
    own = tmp_path / f"counter_{os.getpid()}.db"  # of the living, left alone
    own.write_bytes((next(tmp_path.glob("counter_*.db"))).read_bytes())
    with multiproc.locked(str(tmp_path)):
        pass
    left = sorted(f.name for f in tmp_path.glob("*.db"))
    assert left == sorted(["counter_gone.db", "histogram_gone.db", own.name])
    own.unlink()
    count_in_a_process(tmp_path, 5)
    text = merged(tmp_path)
    assert gauge(text, 'sluice_reaped_total{kind="deadline"}') == 12
    assert gauge(text, 'sluice_time_to_first_token_seconds_count{model="m"}') == 3
    assert gauge(text, 'sluice_time_to_first_token_seconds_bucket{le="0.5",model="m"}') == 3


def merged(folder: Path) -> bytes:
    """What a pool's exporter says, less what this process has counted itself."""
    registry = CollectorRegistry()
    registry.register(multiproc.Merged(str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc, "REGISTRY", CollectorRegistry())
        return generate_latest(registry)


def test_an_empty_file_spoils_no_scrape(tmp_path: Path) -> None:
    """Of a process that is just making it, or was killed while it did."""
    count_in_a_process(tmp_path, 3)
    (tmp_path / f"histogram_{os.getpid()}.db").touch()
    (tmp_path / "counter_999999999.db").touch()
    assert gauge(merged(tmp_path), 'sluice_reaped_total{kind="deadline"}') == 3
    assert not (tmp_path / "counter_999999999.db").exists()


def test_a_pools_exporter_adds_what_it_counted_in_memory(tmp_path: Path) -> None:
    count_in_a_process(tmp_path, 2)
    own = value("sluice_reaped_total", kind="deadline")
    counted_here.reaped("deadline")
    registry = CollectorRegistry()
    registry.register(multiproc.Merged(str(tmp_path)))
    assert gauge(generate_latest(registry), 'sluice_reaped_total{kind="deadline"}') == own + 3


@pytest.mark.timeout(180)
async def test_a_pool_serves_what_it_counts(deploy: Deploy, redis_url: str, tmp_path: Path, free_port: int) -> None:
    env = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "REDIS_URL": redis_url, "TMPDIR": str(tmp_path),
        "SLUICE_MODELS": "scripted=scripted:rate=200", "SLUICE_DEVICES": "cpu", "SLUICE_HEARTBEAT_TTL": "5",
    }  # fmt: skip
    env.pop(multiproc.VARIABLE, None)
    command = [sys.executable, "manage.py", "runworker", "--metrics-port", str(free_port)]
    pool = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{free_port}/metrics"
    try:
        # A living TTL of its own: this process has to see the pool's heartbeats.
        gateway = await deploy(heartbeat_interval=0.5, heartbeat_ttl=5.0).gateway()
        await eventually(lambda: gateway.models(), 90, what="the pool is ready")
        async with gateway.request(spec(400)) as stream:
            await stream.next()
            os.kill((await gateway.workers())[0].pid, signal.SIGKILL)
            await read(stream)
            assert stream.tokens == 400
        text = httpx.get(url, timeout=20).content
        assert gauge(text, 'sluice_failovers_total{result="continued"}') == 1
        assert gauge(text, 'sluice_reaped_total{kind="worker_requeued"}') == 1
        assert gauge(text, 'sluice_step_duration_seconds_count{model="scripted"}') > 100
        assert list(tmp_path.glob("sluice-metrics-*"))
        pool.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(pool.wait, 30) == 0
        assert not list(tmp_path.glob("sluice-metrics-*"))
    finally:
        pool.kill()
        pool.wait()


HOLD = """
import signal
from inference import multiproc
with multiproc.folder() as made:
    print(made, flush=True)
    signal.pause()
"""


def test_the_folder_of_a_killed_tree_is_swept_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(multiproc.VARIABLE, raising=False)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        killed, living = (Path(h.stdout.readline().strip()) for h in holders)  # type: ignore[union-attr]
        holders[0].kill()
        holders[0].wait()
        assert killed.exists()
        with multiproc.folder() as made:
            assert Path(made).parent == tmp_path
            assert not killed.exists()
            assert living.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_private_folder_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(multiproc.VARIABLE, raising=False)
    with multiproc.folder() as made:
        assert Path(made).stat().st_mode & 0o077 == 0
    assert not Path(made).exists()


# -- the page and the dashboard ------------------------------------------------------------------------


def test_the_reference_is_up_to_date() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    assert page == reference.updated(page), "run: python -m sluice.metrics.reference"


def test_dashboard_and_rules_name_only_what_exists() -> None:
    known = {*LIVE, *counted_here.DEFINED}
    known |= {f"{n}_{part}" for n, (kind, *_) in counted_here.DEFINED.items() if kind == "histogram"
              for part in ("bucket", "sum", "count")}  # fmt: skip
    board = json.loads((ROOT / "deploy/grafana/sluice.json").read_text())
    texts = [t["expr"] for p in board["panels"] for t in p.get("targets", [])]
    texts += [(ROOT / "deploy/prometheus" / name).read_text() for name in ("rules.yml", "alerts.yml")]
    named = {name for text in texts for name in re.findall(r"(?<![\w:])sluice_\w+", text)}
    assert named - known == set()
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
