"""The hour behind the charts, the counts drawn from it, remembered audits, slow clients, beats' ages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.test import AsyncClient
from django.urls import reverse

from apps.inflight import panels
from apps.inflight.charts import HEIGHT, WIDTH, charts, nice
from inference.config import Config, host_name
from inference.gateway import Gateway, StreamGroup, hub
from inference.gateway.sampler import Sampler
from inference.gateway.stream import RequestStream
from inference.lifecycle import Outcome, Reason
from inference.messages import Ending, EngineStats, Frame, WorkerBeat, encode
from inference.store.series import SPAN, Sample, Series
from sluice import runtime
from tests.apps.inflight.conftest import SERVER, WORKER, Bench
from tests.core.test_inflight_command import inflight
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)

ENDINGS = reverse("admin:inflight_inflightrequest_endings")
HEALTH = reverse("admin:inflight_inflightrequest_health")
LIST = reverse("admin:inflight_inflightrequest_changelist")


async def test_one_sample_per_period_however_many_servers_ask(bench: Bench) -> None:
    redis, keys = bench.store.redis, bench.store.keys
    await redis.call("DEL", f"{keys.prefix}series:load")  # the gateway's own
    await bench.submit("a")
    await bench.submit("b")
    await bench.claim(1)
    await bench.token("a", 1)
    await bench.store.settle("a", Outcome.finished("stop"))
    servers = [Series(redis, keys) for _ in range(5)]
    assert sum(await asyncio.gather(*(s.sample(12.5, 1) for s in servers))) == 1
    (sample,) = await servers[0].load()
    assert (sample.inflight, sample.running, sample.rate) == (1, 1, 12.5)
    assert sample.outcomes == {"finished:stop": 1} and 0 <= sample.ttft_p50 <= sample.ttft_p95 < 60_000
    quick = Series(redis, keys, period=0.001)
    await eventually(lambda: quick.sample(1.0, 0), every=0.002)
    newest = (await quick.load())[-1]
    assert newest.ttft_p50 == -1, "nothing has ended since the sample before"
    assert 0 < await redis.call("PTTL", f"{keys.prefix}series:load") <= 2 * SPAN * 1000
    assert (await bench.gateway.audit()).clean


async def test_series_is_bounded_and_survives_a_clock_set_back(bench: Bench) -> None:
    redis, keys = bench.store.redis, bench.store.keys
    ahead = Sample((await bench.gateway.now_ms()) + 10**6, 0, 0, 0.0, -1, -1)
    await redis.call("DEL", f"{keys.prefix}series:load")
    await redis.call("RPUSH", f"{keys.prefix}series:load", *[encode(ahead)] * 500)
    assert await Series(redis, keys).sample(0.0, 0)
    assert len(await bench.gateway.load()) == 361


def test_sampler_measures_what_was_generated_between_two_looks() -> None:
    def beat(worker: str, tokens: int) -> WorkerBeat:
        stats = EngineStats(running=2, generated_tokens=tokens)
        return WorkerBeat(worker, "p", "h", 1, "cpu", "ready", [], stats, 1, "1")

    workers = [beat("a", 1000)]
    sampler = Sampler(None, lambda: workers)  # type: ignore[arg-type]
    assert sampler.measure(100.0) == (0.0, 2), "the first look has nothing to compare with"
    workers = [beat("a", 1050), beat("b", 999)]
    assert sampler.measure(110.0) == (5.0, 4), "a worker that is new counts from the next look on"
    workers = [beat("a", 10), beat("b", 1019)]
    assert sampler.measure(120.0) == (2.0, 4), "a counter that starts anew does not count backwards"


async def test_a_server_samples_by_itself(bench: Bench) -> None:
    async def sampled() -> bool:
        return len(await bench.gateway.load()) == 1

    await eventually(sampled)


def ending(ago_ms: int, now_ms: int) -> Ending:
    return Ending("r", "m", "finished", "stop", "chat", "sse", "o", "s", "w", 1, 1, 1, 1, 1, 1, now_ms - ago_ms)


def test_counts_where_the_history_is_too_short() -> None:
    now = 10**8
    minute = 60_000
    totals = {"finished:stop": 1000, "failed:engine_error": 7}

    def sample(ago: int, stop: int, failed: int) -> Sample:
        outcomes = {"finished:stop": stop, "failed:engine_error": failed} if stop else {}
        return Sample(now - ago * minute, 1, 1, 1.0, 1, 1, outcomes)

    def shown(history: list[Ending], samples: list[Sample]) -> tuple[dict[str, tuple[int, int, int]], str]:
        found = panels.counts(history, totals, samples, now, 3)
        return {c["name"]: (c["five"], c["hour"], c["ever"]) for c in found["counts"]}, found["covers"]

    busy = [ending(1000 * i, now) for i in range(3)]
    hour = [sample(61, 100, 1), sample(60, 200, 2), sample(30, 500, 5), sample(5, 900, 7)]
    assert shown(busy, hour) == (
        {"finished (stop)": (100, 800, 1000), "failed (engine_error)": (0, 5, 7)}, "",
    )  # fmt: skip
    assert shown(busy, hour[2:])[0]["finished (stop)"] == (100, 500, 1000), "since the first sample"
    assert shown(busy, hour[2:])[1] == "30 m 00 s", "and the page says so"
    assert shown(busy, []) == ({"finished (stop)": (3, 3, 1000), "failed (engine_error)": (0, 0, 7)}, "2.00 s")
    slow = [ending(10 * minute * i, now) for i in range(3)]
    assert shown(slow, hour)[0]["finished (stop)"] == (1, 800, 1000), "the history reaches five minutes back"
    assert shown(busy[:2], [])[0]["finished (stop)"] == (2, 2, 1000), "it holds all there ever was"


def test_charts_are_lines_with_a_scale_and_words() -> None:
    now = 10**8
    samples = [Sample(now - 10_000 * i, i, i // 2, 3.5, 200 if i % 2 else -1, 900 if i % 2 else -1)
               for i in range(40, 0, -1) if i not in range(10, 20)]  # fmt: skip
    inflight, rate, ttft = charts(samples, now)
    assert inflight["top"] == "50" and len(inflight["lines"]) == 2
    assert len(inflight["lines"][0]["paths"]) == 2, "nothing was measured for a while: the line is broken"
    points = [tuple(map(float, p.split(","))) for p in inflight["lines"][0]["paths"][0]["points"].split()]
    assert points[0] == pytest.approx((WIDTH - 40 / 360 * WIDTH, HEIGHT * (1 - 40 / 50)))
    assert inflight["summary"].startswith("Requests in flight over the last hour. in flight: last 1, highest 40")
    assert rate["lines"][0]["last"] == "3.5" and ttft["lines"][1]["most"] == "0.90 s"
    assert len(ttft["lines"][0]["paths"]) == 2, "a sample without an ending is no break"
    assert not any(path["dot"] for path in inflight["lines"][0]["paths"])
    for few in (1, 2, 3):
        (lone,) = charts(samples[:few], now)[0]["lines"][0]["paths"]
        assert lone["dot"] and len(lone["points"].split()) == max(few, 2), "too short to be seen as a line"
    assert all(c["empty"] and "Nothing has been measured" in c["summary"] for c in charts([], now))
    assert [nice(v) for v in (0, 1, 1.1, 2, 3, 7, 10, 11, 99, 5000)] == [1, 1, 2, 2, 5, 10, 10, 20, 100, 5000]


async def test_counts_with_a_small_history(bench: Bench, boss: AsyncClient, make_config: Callable[..., Config]) -> None:
    """SLUICE_HISTORY_SIZE says how much is kept; before, whatever was less than a thousand passed for all there was."""
    async with Gateway(make_config(history_size=2)) as small:
        with runtime.replaced(small):
            for name in ("a", "b", "c", "d"):
                await bench.submit(name)
                await small.cancel(name, Reason.ADMIN)
            page = await boss.get(ENDINGS)
    assert len(page.context["lines"]) == 2
    (count,) = page.context["counts"]
    assert count["ever"] == 4
    assert count["hour"] == 4 or page.context["covers"], "the page says that it does not know of all"


async def test_charts_on_the_page(bench: Bench, boss: AsyncClient) -> None:
    await bench.gateway.audit()
    page = (await boss.get(ENDINGS)).content.decode()
    assert page.count('<svg role="img"') == 3
    assert '<polyline class="dot"' in page, "the one sample that there is can be seen"
    assert " style=" not in page.split('id="content-main"')[1].split("</figure>")[0], "CSP allows no inline style"


async def test_audits_of_every_server_are_remembered(
    bench: Bench, boss: AsyncClient, make_config: Callable[..., Config]
) -> None:
    for i in range(150):
        await bench.store.redis.call("SET", f"{bench.store.keys.prefix}nobodys:{i}", 1)
    async with Gateway(make_config()) as other:
        await other.audit()
        by = other.id
    status, out = await inflight(bench.gateway.config.redis_url, "--audit")
    assert status == 1 and "150 findings" in out
    page = (await boss.get(HEALTH)).content.decode()
    assert f"manage.py on {host_name()}" in page
    assert by in page and "150 findings, the first 100" in page
    for _ in range(25):
        await bench.gateway.audit()
    assert len(await bench.gateway.audits()) == 20


async def read_log(request_id: str, after: int, limit: int) -> list[bytes]:
    return []


def stream_of(request_id: str = "r") -> RequestStream:
    return RequestStream(request_id, None, read_log=read_log, buffer=4)


async def test_reader_that_stays_away_is_blocked() -> None:
    stream = stream_of()
    assert stream.blocked_for(1e9) == 0, "nothing waits"
    for seq in range(1, 9):  # more than the buffer takes
        stream.feed(1, encode(Frame(seq, [seq], "x")))
    first = stream._waiting_since
    assert first and stream.blocked_for(first + 5) == 5
    await stream.next()
    assert stream.blocked_for(1e9), "what did not fit waits in the log, and the reader is away again"
    reading = asyncio.create_task(stream.next())
    await eventually(lambda: stream.blocked_for(1e9) == 0, what="the reader came back")
    reading.cancel()
    last = stream_of()
    last.feed(1, encode(Frame(1, [1], "x", "stop")))
    await last.next()
    assert last.blocked_for(last._waiting_since + 3) == 3, "it has the last frame and does not leave"
    fellows = [stream_of("a"), stream_of("b")]
    group = StreamGroup(fellows)
    fellows[0].feed(1, encode(Frame(1, [1], "x", "stop")))
    await group.next()
    assert fellows[0].blocked_for(1e9) == 0, "it waits for its fellow, and not for the client"
    fellows[1].feed(1, encode(Frame(1, [1], "x", "stop")))
    await group.next()
    assert group.done and all(s.blocked_for(1e9) for s in fellows)


async def test_slow_client_is_seen_on_the_page_of_any_server(
    bench: Bench, boss: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_BLOCKED_AFTER", 0.01)
    async with bench.gateway.request(bench.submission("slow")) as stream:
        await bench.claim()
        stream.feed(1, encode(Frame(1, [1], "x")))

        async def phase(wanted: str) -> None:
            async def seen() -> bool:
                view = await bench.gateway.view("slow")
                return view is not None and view.phase == wanted

            await eventually(seen)

        await phase("blocked")
        page = (await boss.get(f"{LIST}?phase=blocked")).content.decode()
        assert "blocked by its client" in page and "tokens wait since" in page
        await stream.next()
        await phase("prefill")
        stream.cancel(Reason.USER)
    assert await bench.gateway.view("slow") is None


async def test_heartbeats_have_an_age(bench: Bench) -> None:
    redis, keys = bench.store.redis, bench.store.keys
    await redis.call("PEXPIRE", keys.worker_beat(WORKER), 50_000)  # of 60 s
    await redis.call("PEXPIRE", keys.server_beat(SERVER), 60_000)
    await bench.pool()
    tables = await panels.processes(bench.gateway)
    (worker,) = tables["workers"]
    assert worker["late"] and 10 <= float(worker["heard"].split()[0]) < 20
    server = next(s for s in tables["servers"] if s["beat"].id == SERVER)
    assert not server["late"] and not tables["pools"][0]["late"]


async def test_ui_06_many_unrelated_keys_and_five_pages(bench: Bench, redis: Any) -> None:
    """Five pages refresh over 100,000 keys of others and 2,000 requests: no KEYS, no SCAN, few commands."""
    from apps.inflight.feed import Feed
    from apps.inflight.query import Query
    from apps.inflight.roster import roster

    fill = "for i = ARGV[1], ARGV[2] do redis.call('SET', 'unrelated:' .. i, i) end"
    for start in range(0, 100_000, 10_000):
        await redis.eval(fill, 0, start, start + 9_999)
    await asyncio.gather(*(bench.submit(f"r-{i}") for i in range(2000)))
    queries = (Query(), Query(page=3), Query(q="r-1"), Query(phase="queued", sort="-id"), Query(owner="user:1"))
    feeds = [Feed(bench.gateway, q) for q in queries]
    await asyncio.gather(*(f.update() for f in feeds))
    await redis.config_resetstat()
    rounds = 3
    for _ in range(rounds):
        roster.expire()
        await asyncio.gather(*(f.update() for f in feeds))
    stats = await redis.info("commandstats")
    assert not {f"cmdstat_{name}" for name in ("keys", "scan", "sscan", "hscan")} & stats.keys(), stats.keys()
    scripts = stats["cmdstat_evalsha"]
    # Two plain pages at one command each, one shared read of 2,000 in chunks of 100; the rest is the gateway's own.
    assert scripts["calls"] <= rounds * (2 + 20) + 20, stats
    assert scripts["usec_per_call"] < 5000
