"""The metrics of a whole site: several processes, real clients, kills, junk, and Prometheus itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_sync

from inference.embedded import EmbeddedValkey
from tests.conftest import ROOT, skip_or_fail
from tests.platform.metrics_site import TOKEN, MetricsSite, Sample, at_rest
from tests.support import eventually, eventually_sync, find_free_port

pytestmark = pytest.mark.timeout(240)
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "sluice.json"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, empty_valkey: EmbeddedValkey) -> Iterator[MetricsSite]:
    made = MetricsSite(tmp_path_factory.mktemp("metrics"), empty_valkey, "--processes", "2")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def rested(site: MetricsSite) -> Sample:
    """The figures before a test, with nothing in flight."""
    return eventually_sync(lambda: _rest(site), 20, what="the site at rest")


def _rest(site: MetricsSite) -> Sample:
    sample = site.scrape()
    at_rest(sample)
    return sample


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": text, "max_tokens": 8, "ignore_eos": True, **fields}


async def stream(client: httpx.AsyncClient, tokens: int, text: str = "hi") -> tuple[float, list[float], float]:
    """One streamed answer: time to the first text, gaps between texts, time in all (s)."""
    began = time.monotonic()
    times = []
    async with client.stream("POST", "/v1/completions", json=body(text, max_tokens=tokens, stream=True)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.monotonic())  # noqa: PERF401 - the time is that of its arrival
    return times[0] - began, [b - a for a, b in pairwise(times)], time.monotonic() - began


async def open_stream(site: MetricsSite, client: httpx.AsyncClient, tokens: int = 4000) -> httpx.Response:
    """A stream that has begun; ``aclose`` it to go away."""
    request = client.build_request("POST", "/v1/completions", json=body(max_tokens=tokens, stream=True))
    response = await client.send(request, stream=True)
    assert response.status_code == 200
    lines = response.aiter_lines()
    async for line in lines:
        if line.startswith("data: "):
            response.extensions["lines"] = lines  # closes the connection when it is collected
            return response
    raise AssertionError("no first token")


async def test_me_01_all_cancelled_at_once(site: MetricsSite, rested: Sample) -> None:
    """ME-01: 50 streams closed at once; with no new work the gauges are at zero by +3 s."""
    async with site.client() as client:
        responses = await asyncio.gather(*(open_stream(site, client) for _ in range(50)))
        busy = await eventually(lambda: _running(site, 50), 10)
        assert busy.sum("sluice_requests_inflight") == 50
        closed = time.monotonic()
        await asyncio.gather(*(r.aclose() for r in responses))
    for wait in (1.0, 3.0, 10.0):
        await asyncio.sleep(max(0.0, closed + wait - time.monotonic()))
        sample = site.scrape()
        assert all(value >= 0 for value in sample.series.values())
        if wait >= 3:
            at_rest(sample)
            assert sample.sum("sluice_kv_blocks", state="used") == 0
    assert gain(rested, sample, "sluice_requests_total", outcome="cancelled") == 50
    assert gain(rested, sample, "sluice_requests_started_total") == 50
    assert gain(rested, sample, "sluice_streams_total", outcome="abandoned") == 50


def _running(site: MetricsSite, count: int) -> Sample | None:
    sample = site.scrape()
    return sample if sample.sum("sluice_requests_inflight", state="running") == count else None


def gain(before: Sample, after: Sample, name: str, **labels: str) -> float:
    return after.sum(name, **labels) - before.sum(name, **labels)


async def test_me_03_junk_makes_no_series(site: MetricsSite, rested: Sample) -> None:
    """ME-03: random models, paths, methods, agents and ids leave the number of series as it was."""
    rng = random.Random(7)

    async def junk(client: httpx.AsyncClient, count: int) -> None:
        for n in range(count):
            word = f"{rng.getrandbits(64):x}"
            headers = {"user-agent": word, "x-request-id": word, "x-session-id": word}
            if n % 2:
                response = await client.post("/v1/completions", json=body(model=word), headers=headers)
                assert response.status_code == 404
            else:
                method = rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", word.upper()[:8].translate(_LETTERS)])
                await client.request(method, f"/{word}/{word}", headers=headers)

    async with site.client() as client:
        await asyncio.gather(*(junk(client, 40) for _ in range(4)))  # whatever one value each may take
        before = site.scrape()
        await asyncio.gather(*(junk(client, 250) for _ in range(8)))
    after = site.scrape()
    assert after.names - before.names == set()
    took = min(_timed(site) for _ in range(5))
    assert took < 0.2, f"a scrape takes {took:.3f} s"


_LETTERS = str.maketrans("0123456789", "GHIJKLMNOP")


def _timed(site: MetricsSite) -> float:
    began = time.monotonic()
    site.scrape()
    return time.monotonic() - began


async def test_our_figures_agree_with_the_clients(site: MetricsSite, rested: Sample) -> None:
    """One TTFT per request, one gap fewer than tokens, and the means within 10 % of those the client saw.

    The client runs beside the server: on a busy machine it sees some of its own waiting, but not every time.
    """
    before = rested
    for _ in range(4):
        async with site.client() as client:
            seen = await asyncio.gather(*(stream(client, 60, f"{n}") for n in range(4)))
        after = await eventually(lambda: _rest(site), 20)
        assert gain(before, after, "sluice_time_to_first_token_seconds_count") == 4
        assert gain(before, after, "sluice_generated_tokens_total") == 240
        assert gain(before, after, "sluice_inter_token_latency_seconds_count") == 240 - 4
        assert gain(before, after, "sluice_step_duration_seconds_count") > 0
        gaps = [gap for _, gaps, _ in seen for gap in gaps]
        pairs = [
            ("sluice_inter_token_latency_seconds", sum(gaps) / len(gaps), 0.0),
            ("sluice_request_duration_seconds", sum(total for *_, total in seen) / 4, 0.05),
            ("sluice_time_to_first_token_seconds", sum(ttft for ttft, *_ in seen) / 4, 0.1),
        ]
        apart = [
            (name, ours, theirs)
            for name, theirs, room in pairs
            if (ours := mean(before, after, name)) != pytest.approx(theirs, rel=0.1, abs=room)
        ]
        if not apart:
            return
        before = after
    pytest.fail(f"ours, theirs: {apart}")


def mean(before: Sample, after: Sample, name: str) -> float:
    return gain(before, after, f"{name}_sum") / gain(before, after, f"{name}_count")


async def test_me_05_mixed_endings_leave_no_inflight(site: MetricsSite, rested: Sample) -> None:
    """ME-05: 1,000 endings; after each kind of them nothing is in flight, in Redis or in the gauge, and sums agree."""
    count = 125
    gate = asyncio.Semaphore(32)
    async with site.client() as client:

        async def normal() -> None:
            await stream(client, 3)

        async def invalid() -> None:
            assert (await client.post("/v1/completions", json=body(max_tokens=-1))).status_code == 400

        async def engine_error() -> None:
            assert (await client.post("/v1/completions", json=body("[[error@2]]"))).status_code == 500

        async def gone_early() -> None:
            await leave_after(client, 0.05, body(max_tokens=4000))

        async def gone_in_queue_or_prefill() -> None:
            await leave_after(client, 0.3, body("x" * 100, model="narrow", max_tokens=3000))

        async def gone_in_decode() -> None:
            await (await open_stream(site, client)).aclose()

        async def deadline() -> None:
            response = await client.post("/v1/completions", json=body(max_tokens=4000, timeout=0.5))
            assert response.status_code >= 400

        async def redis_stands_still() -> None:
            with redis_sync.Redis.from_url(site.env["REDIS_URL"]) as redis:
                redis.client_pause(300, all=True)
            await stream(client, 3)

        async def limited(act: Callable[[], Awaitable[None]]) -> None:
            async with gate:
                await act()

        for act in (normal, invalid, engine_error, gone_early, gone_in_queue_or_prefill, gone_in_decode, deadline):
            await asyncio.gather(*(limited(act) for _ in range(count)))
            await eventually(lambda: _rest(site), 20, what=f"nothing in flight after {act.__name__}")
            assert live_in_redis(site) == 0
        for _ in range(5):
            await redis_stands_still()
        await eventually(lambda: _rest(site), 20)
        await asyncio.gather(*(limited(normal) for _ in range(count - 5)))
    after = await eventually(lambda: _rest(site), 20)
    assert live_in_redis(site) == 0
    assert gain(rested, after, "sluice_requests_total", outcome="finished") == 2 * count
    assert gain(rested, after, "sluice_requests_total", outcome="failed", reason="engine_error") == count
    assert gain(rested, after, "sluice_requests_total", outcome="cancelled", reason="deadline") == count
    assert 2 * count <= gain(rested, after, "sluice_requests_total", reason="client_gone") <= 3 * count


async def leave_after(client: httpx.AsyncClient, seconds: float, content: dict[str, Any]) -> None:
    """Ask, and hang up before the answer."""
    with pytest.raises((TimeoutError, httpx.TransportError)):
        async with asyncio.timeout(seconds):
            await client.post("/v1/completions", json=content)


def live_in_redis(site: MetricsSite) -> int:
    with redis_sync.Redis.from_url(site.env["REDIS_URL"]) as redis:
        return int(redis.zcard("sluice:live"))


async def test_killed_processes_leave_no_ghost(site: MetricsSite, rested: Sample) -> None:
    """kill -9 of a worker and of a server under load: what they counted stays, what they had open goes."""
    async with site.client() as client:
        streams = await asyncio.gather(*(open_stream(site, client) for _ in range(8)))
        before = await eventually(lambda: _running(site, 8), 10)
        worker = site.children(site.pool)[0]
        os.kill(worker, signal.SIGKILL)
        await eventually(lambda: site.scrape().sum("sluice_worker_restarts_total") >= 1, 20)
        victim = site.children(site.server)[0]
        os.kill(victim, signal.SIGKILL)
        for response in streams:
            await response.aclose()

    def settled() -> Sample | None:
        try:
            sample = _rest(site)
        except httpx.TransportError:  # a connection that the killed one had accepted
            return None
        up = sample.sum("sluice_worker_up", state="ready") == 2 and sample.sum("sluice_drain_state") == 2
        return sample if up else None

    after = await eventually(settled, 60, every=0.2)
    for name in ("sluice_requests_started_total", "sluice_generated_tokens_total"):
        assert after.sum(name) >= before.sum(name)
    assert gain(rested, after, "sluice_requests_total") == 8
    assert after.sum("sluice_http_exchanges_inflight") == after.sum(
        "sluice_http_exchanges_inflight", route="/metrics"
    )  # fmt: skip
    files = os.listdir(site.counts)
    assert not [f for f in files if re.search(rf"_({worker}|{victim})\.db$", f)]
    assert [f for f in files if f.endswith("_gone.db")]


async def test_one_log_line_per_request(site: MetricsSite, rested: Sample) -> None:
    """Figures of each ended request in one JSON line, with the client's X-Request-ID, and never its text."""
    mark, secret = f"log-{secrets.token_hex(4)}", f"secret{secrets.token_hex(6)}"
    async with site.client() as client:
        response = await client.post("/v1/completions", json=body(secret), headers={"x-request-id": mark})
        assert response.headers["x-request-id"] == mark
        made = await client.post("/v1/completions", json=body(), headers={"x-request-id": "bad id\t" + "x" * 100})
        assert made.headers["x-request-id"].startswith("req-")
    lines = await eventually(lambda: [e for e in _log(site) if e.get("request_id") == mark], 10)
    ended = [e for e in lines if e.get("event") == "request_ended"]
    assert len(ended) == 1
    line = ended[0]
    assert line["id"] == response.json()["id"]
    assert (line["level"], line["logger"]) == ("info", "sluice.request")
    assert (line["endpoint"], line["transport"], line["model"]) == ("completions", "json", "demo")
    assert (line["outcome"], line["reason"], line["generated_tokens"]) == ("finished", "length", 8)
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["duration_ms"]
    assert secret not in site.log.read_text()
    assert response.json()["choices"][0]["text"] not in site.log.read_text()


def _log(site: MetricsSite) -> list[dict[str, Any]]:
    """Every line of every process is a JSON object."""
    lines = site.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.strip() and not line.startswith("Exception ignored")]


def test_who_may_scrape(site: MetricsSite) -> None:
    assert httpx.get(f"{site.url}/metrics").status_code == 401
    assert httpx.get(f"{site.url}/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401
    plain = {"authorization": f"Bearer {site.key}"}
    assert httpx.get(f"{site.url}/metrics", headers=plain).status_code == 403


def test_promtool_likes_what_we_say(site: MetricsSite) -> None:
    tool = promtool()
    ours = "\n".join(line for line in site.scrape().text.splitlines() if "sluice_" in line) + "\n"
    result = subprocess.run([tool, "check", "metrics"], input=ours, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rules_and_their_tests() -> None:
    for arguments in (
        ["check", "rules", "rules.yml", "alerts.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "tests.yml"],
    ):
        result = subprocess.run([promtool(), *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        skip_or_fail("no promtool (Debian: apt install prometheus)")
    return found or ""


def queries() -> list[tuple[str, str]]:
    """(panel, query) of the dashboard, its variables filled in."""
    board = json.loads(DASHBOARD.read_text())
    found = []
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "30s").replace("$model", ".*")
            found.append((panel["title"], query))
    return found


class Prometheus:
    """A real one, scraping a site every half second, with the rules loaded."""

    def __init__(self, folder: Path, site: MetricsSite) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            skip_or_fail("no prometheus (Debian: apt install prometheus)")
        self.url = f"http://127.0.0.1:{find_free_port()}"
        token = site.env["SLUICE_METRICS_TOKEN"]
        config = (PROMETHEUS / "prometheus.yml").read_text()
        config = config.replace("15s", "500ms").replace("127.0.0.1:8000", site.url.removeprefix("http://"))
        config = config.replace("[rules.yml, alerts.yml]", f"[{PROMETHEUS}/rules.yml, {PROMETHEUS}/alerts.yml]")
        config = re.sub(r"# authorization: .*", f"authorization: {{credentials: {token}}}", config)
        (folder / "prometheus.yml").write_text(config)
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(
                [binary or "", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={self.url.removeprefix('http://')}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def ask(self, query: str) -> list[dict[str, Any]]:
        response = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=20)
        answer = response.json()
        assert answer["status"] == "success", f"{query}: {answer}"
        return answer["data"]["result"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


async def test_prometheus_scrapes_and_every_panel_has_an_answer(site: MetricsSite, tmp_path: Path) -> None:
    """Prometheus itself, on the running site: the panels' queries give figures, and those that were asked for."""
    prometheus = Prometheus(tmp_path, site)
    try:

        def scraped() -> bool:
            try:
                return prometheus.ask('up{job="sluice"} == 1') != []
            except httpx.TransportError:
                return False

        await eventually(scraped, 60, every=0.2)
        before = prometheus.ask("sum(sluice_requests_total)")
        async with site.client() as client:
            for _ in range(6):
                await asyncio.gather(*(stream(client, 30) for _ in range(4)))
            for _ in range(3):
                await (await open_stream(site, client)).aclose()
            assert (await client.post("/v1/completions", json=body("[[error@2]]"))).status_code == 500
            assert (await client.post("/v1/completions", json=body(model="nobody"))).status_code == 404
        want = (float(before[0]["value"][1]) if before else 0.0) + 28
        await eventually(lambda: float(prometheus.ask("sum(sluice_requests_total)")[0]["value"][1]) == want, 20)
        async with site.client() as client:
            # Held in a list: a response that is collected closes its connection.
            held = [await open_stream(site, client) for _ in range(4)]
            running = 'max(sum by (instance) (sluice_requests_inflight{state="running"}))'
            await eventually(lambda: float(prometheus.ask(running)[0]["value"][1]) == len(held), 20)
            answers = {(panel, query): prometheus.ask(query) for panel, query in queries()}
        Path(os.environ.get("SLUICE_TEST_PANELS", tmp_path / "panels.md")).write_text(as_table(answers))
        # A model that nobody has configured is refused before it is a request, and not counted as one.
        silent = [f"{p}: {q}" for (p, q), result in answers.items() if not result and "refused" not in q]
        assert silent == []
        tokens = prometheus.ask("sum(increase(sluice_generated_tokens_total[1m]))")
        assert float(tokens[0]["value"][1]) > 0
        assert await eventually(lambda: prometheus.ask("sluice:requests_inflight"), 20, every=0.2)
        firing = prometheus.ask('ALERTS{alertstate="firing"}')
        assert firing == []
    finally:
        prometheus.close()


@pytest.mark.timeout(180)
def test_up_counts_for_all_its_processes_and_leaves_no_folder(tmp_path: Path) -> None:
    """``manage.py up``: what workers count is on the server's page; the folder goes with the tree."""
    folder = Path(tempfile.mkdtemp(prefix="m-"))  # short: a socket is made below it
    log = (tmp_path / "up.log").open("w+")
    env = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "TMPDIR": str(folder), "SLUICE_DEVICES": "cpu",
        "SLUICE_VAR_DIR": str(tmp_path), "SLUICE_MODELS": "demo=scripted:rate=200", "SLUICE_METRICS_TOKEN": TOKEN,
        "SLUICE_PRE_DRAIN": "0", "SLUICE_DEBUG": "0",
    }  # fmt: skip
    for name in ("REDIS_URL", "PROMETHEUS_MULTIPROC_DIR"):
        env.pop(name, None)
    port = find_free_port()
    up = subprocess.Popen(
        [sys.executable, "manage.py", "up", "--port", str(port)], cwd=ROOT, env=env, stdout=log, stderr=log
    )
    try:
        eventually_sync(lambda: "Ctrl-C stops everything" in (tmp_path / "up.log").read_text(), 120, every=0.2)
        key = re.search(r"API key +(sk-\S+)", (tmp_path / "up.log").read_text())
        assert key
        headers = {"Authorization": f"Bearer {key[1]}"}
        url = f"http://127.0.0.1:{port}"
        answer = httpx.post(f"{url}/v1/completions", json=body(), headers=headers, timeout=30)
        assert answer.status_code == 200
        assert list(folder.glob("sluice-metrics-*/histogram_*.db"))

        def counted() -> bool:
            text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, timeout=20).text
            sample = Sample(text)
            at_rest(sample)
            return sample.sum("sluice_requests_total") == 1 and sample.sum("sluice_step_duration_seconds_count") >= 8

        eventually_sync(counted, 10)
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0
        assert not list(folder.glob("sluice-metrics-*"))
    finally:
        up.kill()
        up.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def as_table(answers: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """As it stands in ``docs/metrics.md``."""
    rows = []
    for (panel, query), result in answers.items():
        plain = re.sub(r'\{model=~"\.\*"\}|(?<=\{)model=~"\.\*",|,model=~"\.\*"', "", query)
        rows.append(f"| {panel} | `{plain}` | {_short(result)} |")
    return "\n".join(["| panel | query | answer |", "|---|---|---|", *rows]) + "\n"


def _short(result: list[dict[str, Any]]) -> str:
    parts = []
    for one in result[:6]:
        labels = ", ".join(f"{k}={v}" for k, v in one["metric"].items() if k != "__name__")
        parts.append(f"{labels or 'value'}: {float(one['value'][1]):.4g}")
    return "; ".join(parts) or "(no series yet)"
