"""The pages of the in-flight admin over a real gateway: what they show, and to whom."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import AsyncClient
from django.urls import reverse

from apps.inflight.panels import redis_warnings
from inference.errors import StoreUnavailable
from inference.lifecycle import Outcome, Reason
from inference.messages import Job, SamplingParams
from inference.store import Submission
from inference.store.store import Append
from sluice import runtime
from tests.apps.inflight.conftest import SERVER, WORKER, Bench

LIST = reverse("admin:inflight_inflightrequest_changelist")
WORKERS = reverse("admin:inflight_inflightrequest_workers")
ENDINGS = reverse("admin:inflight_inflightrequest_endings")
HEALTH = reverse("admin:inflight_inflightrequest_health")
HOSTILE = """<script>alert(1)</script><img src=x onerror=alert(2)>"'&{{7*7}}"""


def one(request_id: str) -> str:
    from apps.inflight.rows import request_url

    return request_url(request_id)


async def text(browser: AsyncClient, url: str, status: int = 200) -> str:
    page = await browser.get(url)
    assert page.status_code == status, page.content[:500]
    assert "script-src 'self'" in page["Content-Security-Policy"]
    return page.content.decode()


async def test_list_shows_phases_and_numbers(bench: Bench, boss: AsyncClient) -> None:
    for name in ("r-decode", "r-prefill", "r-queued", "r-next"):
        await bench.submit(name)
    assert await bench.claim(2) == ["r-decode", "r-prefill"]
    await bench.token("r-decode", 1)
    page = await boss.get(LIST)
    rows = {line["id"]: {p["name"]: p["text"] for p in line["parts"]} for line in page.context["rows"]}
    assert {name: r["phase"] for name, r in rows.items()} == {
        "r-next": "queued, place 2",
        "r-queued": "queued, place 1",
        "r-prefill": "prefill",
        "r-decode": "decode",
    }
    assert rows["r-decode"]["worker"] == WORKER and rows["r-decode"]["server"] == SERVER
    assert rows["r-decode"]["generated"] == "1 / 50" and rows["r-decode"]["prompt"] == "3"
    assert rows["r-decode"]["client"] == "connected · 10.0.0.9" and rows["r-decode"]["via"] == "chat · sse"


async def test_all_can_be_cancelled_where_some_match(bench: Bench, boss: AsyncClient) -> None:
    nothing = re.compile(r'name="all"[^>]* disabled>')
    assert nothing.search(await text(boss, LIST))
    await bench.submit("r-1")
    assert not nothing.search(await text(boss, LIST))
    assert nothing.search(await text(boss, f"{LIST}?q=other"))


async def test_names_of_owners(bench: Bench, boss: AsyncClient) -> None:
    from asgiref.sync import sync_to_async

    from apps.accounts import services

    made = await sync_to_async(services.create_key)(None, name="robot")
    await bench.submit("a", owner=f"user:{boss.user.pk}")  # type: ignore[attr-defined]
    await bench.submit("b", owner=f"key:{made.key.prefix}")
    await bench.submit("c", owner="user:999999")
    page = await text(boss, LIST)
    assert ">boss<" in page and f"robot ({made.key.prefix})" in page and "user:999999" in page


async def test_filter_search_sort_and_pages(bench: Bench, boss: AsyncClient) -> None:
    for i in range(120):
        await bench.submit(f"r-{i:03d}", owner="user:2" if i % 2 else "user:1")
    page = await boss.get(LIST)
    assert len(page.context["rows"]) == 50 and page.context["selection"].pages == 3
    assert page.context["rows"][0]["id"] == "r-119"
    page = await boss.get(f"{LIST}?owner=user:2&sort=-id&page=2")
    selection = page.context["selection"]
    assert (selection.matched, selection.total, selection.page) == (60, 120, 2)
    assert [v.id for v in selection.items] == [f"r-{i:03d}" for i in range(19, 0, -2)]
    assert (await boss.get(f"{LIST}?q=r-07")).context["rows"][0]["id"] == "r-079"
    page = await boss.get(f"{LIST}?page=99")
    assert page.context["selection"].page == 3 and len(page.context["rows"]) == 20
    assert "aria-sort" in page.content.decode()


async def test_the_plain_list_costs_the_same_however_many_are_in_flight(bench: Bench, boss: AsyncClient) -> None:
    calls: list[str] = []
    real = bench.store.redis.call

    def counted(name: str, *args: Any) -> Any:
        calls.append(name)
        return real(name, *args)

    bench.gateway.views.redis.call = counted  # type: ignore[method-assign]
    seen = []
    for size in (60, 400):
        for i in range(size):
            await bench.submit(f"r-{size}-{i}")
        await bench.claim(10_000)
        calls.clear()
        await boss.get(LIST)
        seen.append(len([c for c in calls if c not in ("PING",)]))
        assert "KEYS" not in calls and "SCAN" not in calls
    assert abs(seen[0] - seen[1]) <= 10, seen  # heartbeats come in between


async def test_opening_the_list_costs_a_few_queries_whatever_is_in_flight(bench: Bench, boss: AsyncClient) -> None:
    from asgiref.sync import sync_to_async
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    def opened() -> tuple[int, int]:
        client = Client()
        client.force_login(boss.user)  # type: ignore[attr-defined]
        counts = []
        for _ in range(2):
            with CaptureQueriesContext(connection) as queries:
                assert client.get(LIST).status_code == 200
            counts.append(len(queries))
        return counts[0], counts[1]

    for i in range(120):
        await bench.submit(f"r-{i}", owner=f"user:{i}" if i % 2 else f"key:{i:08d}")
    first, again = await sync_to_async(opened)()
    assert (first, again) == (4, 2), "session and user; once a minute also names of users and of keys"


async def test_hostile_text_is_escaped_everywhere(bench: Bench, boss: AsyncClient) -> None:
    await bench.beat(HOSTILE, device=HOSTILE, host=HOSTILE, version=HOSTILE)
    await bench.pool(workers=[HOSTILE], host=HOSTILE)
    await bench.submit(HOSTILE, owner=HOSTILE, client=HOSTILE, endpoint=HOSTILE, transport=HOSTILE)
    await bench.submit("ended", owner=HOSTILE, client=HOSTILE, endpoint=HOSTILE)
    await bench.gateway.cancel("ended", Reason.ADMIN)
    query = f"?q={HOSTILE}&model={HOSTILE}&owner={HOSTILE}&worker={HOSTILE}".replace("&{", "%26{")
    for url in (LIST, LIST + query, one(HOSTILE), one("ended"), WORKERS, ENDINGS, HEALTH):
        page = await text(boss, url)
        assert "<script>alert" not in page and "<img src=x" not in page, url
        assert " onerror=" not in page.replace("&gt;", "").replace("x onerror=alert(2)", ""), url
    confirm = await boss.post(reverse("admin:inflight_inflightrequest_cancel"), {"id": [HOSTILE], "keep": HOSTILE})
    assert b"<script>alert" not in confirm.content and confirm.status_code == 200


async def test_one_request_alive_then_ended_then_forgotten(bench: Bench, boss: AsyncClient) -> None:
    await bench.submit("r-1")
    await bench.claim()
    await bench.token("r-1", 1)
    page = await text(boss, one("r-1"))
    claimed = f"Claimed by {WORKER} (attempt 1)"
    for word in ("Accepted and queued", claimed, "First token", "Deadline", "Cancel this request", "max_tokens"):
        assert word in page, word
    await bench.gateway.cancel("r-1", Reason.ADMIN)
    page = await text(boss, one("r-1"))
    assert "Ended: cancelled (admin)" in page and "Cancel this request" not in page
    assert "No request of this id" in await text(boss, one("never"), status=404)


async def test_each_attempt_is_in_the_timeline_and_no_words_of_the_client(bench: Bench, boss: AsyncClient) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.5, stop=["secret word"], logit_bias={3: 1.0})
    job = Job("r-1", "scripted", [1, 2], params, "secret prompt")
    values = {"endpoint": "chat", "transport": "sse", "owner": "user:1"}
    await bench.store.submit(Submission(job, **values), server=SERVER, slots=10)
    await bench.claim()
    await bench.store.requeue("r-1", worker=WORKER, lost=True)
    await bench.beat("w-second")
    await bench.claim(worker="w-second")
    page = await boss.get(one("r-1"))
    steps = [step["what"] for step in page.context["timeline"]]
    attempts = [
        "Accepted and queued", f"Claimed by {WORKER} (attempt 1)", "Taken from its worker, and queued again",
        "Claimed by w-second (attempt 2)",
    ]  # fmt: skip
    assert steps == [*attempts, "Deadline"]
    shown = dict(page.context["parameters"])
    assert (shown["prompt tokens"], shown["max_tokens"], shown["temperature"]) == ("2", "9", "0.5")
    assert (shown["stop"], shown["logit_bias"]) == ("1 given", "1 given")
    assert "secret" not in page.content.decode()

    # After its end the page says the same, and how it went on.
    await bench.store.append("w-second", [Append("r-1", 2, 1, b"", 1, "", SERVER)], [])
    await bench.store.append("w-second", [Append("r-1", 2, 2, b"", 4, "", SERVER)], [])
    await bench.gateway.cancel("r-1", Reason.ADMIN)
    page = await boss.get(one("r-1"))
    steps = [step["what"] for step in page.context["timeline"]]
    assert steps == [*attempts, "First token", "Last token", "Ended: cancelled (admin)"]
    assert dict(page.context["parameters"]) == shown
    facts = dict(page.context["facts"])
    assert (facts["Attempts"], facts["Tokens in"], facts["Tokens out"]) == ("2", "2", "4")
    assert facts["Time limit"] == "10 m 00 s" and facts["TTFT"] != "-"
    assert "secret" not in page.content.decode()


async def test_a_timeline_of_very_many_attempts_is_bounded(bench: Bench, boss: AsyncClient) -> None:
    """A request that is handed on a hundred times keeps its latest claims, and the right numbers."""
    await bench.submit("r-1")
    for _ in range(100):
        await bench.claim()
        await bench.store.requeue("r-1", worker=WORKER, lost=False)
    await bench.claim()
    await bench.gateway.cancel("r-1", Reason.ADMIN)
    ending = (await bench.gateway.history(1))[0]
    assert len(ending.claims) < 1600
    steps = [step["what"] for step in (await boss.get(one("r-1"))).context["timeline"]]
    claims = [s for s in steps if s.startswith("Claimed")]
    assert claims[-1] == f"Claimed by {WORKER} (attempt 101)" and 20 < len(claims) < 101


async def test_a_frame_without_a_token_is_no_first_token(bench: Bench, boss: AsyncClient) -> None:
    await bench.submit("r-1")
    await bench.claim()
    await bench.store.append(WORKER, [Append("r-1", 1, 1, b"", 0, "error", SERVER)], [])
    await bench.gateway.cancel("r-1", Reason.ADMIN)
    (ending,) = await bench.gateway.history(1)
    assert (ending.first_token_ms, ending.generated_tokens) == (0, 0)


async def test_orphan_is_shown_as_such(bench: Bench, boss: AsyncClient) -> None:
    await bench.submit("r-1")
    await bench.beat("w-dead")
    await bench.claim(worker="w-dead")
    await bench.store.redis.call("DEL", bench.store.keys.worker_beat("w-dead"))
    assert "orphaned" in await text(boss, LIST)
    page = await boss.get(f"{LIST}?phase=orphaned")
    assert [r["id"] for r in page.context["rows"]] == ["r-1"]


async def test_workers_servers_and_pools(bench: Bench, boss: AsyncClient) -> None:
    await bench.pool(broken=True)
    page = await text(boss, WORKERS)
    for word in (
        WORKER,
        SERVER,
        "http /v1/chat/completions",
        "p-test",
        "25 of 100 (25 %)",
        "20 ms",
        "3.0 MiB",
        "broken",
    ):
        assert word in page, word


async def test_what_becomes_of_requests_that_no_worker_is_ready_for(bench: Bench, boss: AsyncClient) -> None:
    refused, waits = "Requests for scripted are refused with 503 (model_unavailable)", "Requests for scripted wait"
    await bench.pool()
    for url in (WORKERS, HEALTH):
        assert "Requests for" not in await text(boss, url)
    await bench.beat(state="quiet")
    for url in (WORKERS, HEALTH):
        page = await text(boss, url)
        assert refused in page and "Resume a quiet worker, or start a pool" in page and "drained worker" not in page, (
            url
        )
    await bench.store.redis.call("DEL", bench.store.keys.worker_beat(WORKER))
    await bench.pool(workers=[], retired=1)
    for url in (WORKERS, HEALTH):
        page = await text(boss, url)
        assert refused in page and "Start a pool (manage.py runworker)" in page and waits not in page, url
        assert "the place of a drained worker stays empty until its own pool is started again" in page, url
    page = await text(boss, WORKERS)
    assert "No worker is alive" in page and "running, 1 place empty since a drain" in page
    await bench.pool(workers=[], starting=["w-new"])
    for url in (WORKERS, HEALTH):
        page = await text(boss, url)
        assert waits in page and refused not in page, url
    await bench.pool(workers=[], starting=["w-new"], broken=True)
    assert refused in await text(boss, WORKERS)


async def test_endings_with_counts(bench: Bench, boss: AsyncClient) -> None:
    for i in range(3):
        await bench.submit(f"r-{i}")
    await bench.gateway.cancel("r-0", Reason.ADMIN)
    await bench.gateway.cancel("r-1", Reason.USER)
    await bench.store.settle("r-2", Outcome.failed(Reason.ENGINE_ERROR))
    page = await boss.get(ENDINGS)
    counts = {c["name"]: (c["five"], c["hour"], c["ever"]) for c in page.context["counts"]}
    assert counts == {
        "cancelled (admin)": (1, 1, 1), "cancelled (user)": (1, 1, 1), "failed (engine_error)": (1, 1, 1),
    }  # fmt: skip
    assert [line["ending"].id for line in page.context["lines"]] == ["r-2", "r-1", "r-0"]
    page = await boss.get(f"{ENDINGS}?outcome=cancelled (user)")
    assert [line["ending"].id for line in page.context["lines"]] == ["r-1"]


async def test_health_shows_a_clean_audit_then_what_is_wrong(bench: Bench, boss: AsyncClient) -> None:
    page = await text(boss, HEALTH)
    assert "Clean: nothing is left behind" in page and "noeviction" in page
    await bench.store.redis.call("ZADD", bench.store.keys.live, 1, "ghost")
    assert "Clean" in await text(boss, HEALTH), "looking does not run it again"
    assert (await boss.post(HEALTH)).status_code == 302
    assert "ghost" in await text(boss, HEALTH)


async def test_health_warns_of_a_bad_configuration(bench: Bench, boss: AsyncClient, redis: Any) -> None:
    before = {name: (await redis.config_get(name))[name] for name in ("maxmemory", "maxmemory-policy")}
    assert 'class="errornote"' not in await text(boss, HEALTH)
    try:
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        assert "The eviction policy is allkeys-lru" in await text(boss, HEALTH)
        await redis.config_set("maxmemory-policy", "noeviction")
        await redis.config_set("maxmemory", (await redis.info("memory"))["used_memory"] * 100 // 85)
        page = await text(boss, HEALTH)
        assert "% of its memory limit" in page and "eviction policy is" not in page
    finally:
        for name, value in before.items():
            await redis.config_set(name, value)
    assert 'class="errornote"' not in await text(boss, HEALTH)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"maxmemory_policy": "volatile-ttl"}, "eviction policy is volatile-ttl"),
        ({"evicted_keys": "7"}, "has evicted 7 keys"),
        ({"used_memory": "81", "maxmemory": "100"}, "uses 81 %"),
        ({"connected_clients": "81", "maxclients": "100"}, "81 of at most 100 clients"),
        ({"role": "slave"}, "is a replica"),
        ({"rdb_last_bgsave_status": "err"}, "could not write to its disk"),
        ({"aof_last_write_status": "err"}, "could not write to its disk"),
    ],
)
def test_each_warning_of_redis(info: dict[str, str], said: str) -> None:
    good = {
        "maxmemory_policy": "noeviction", "evicted_keys": "0", "used_memory": "80", "maxmemory": "100",
        "role": "master", "connected_clients": "80", "maxclients": "100",
        "rdb_last_bgsave_status": "ok", "aof_last_write_status": "ok",
    }  # fmt: skip
    assert redis_warnings(good) == redis_warnings({}) == []
    (warning,) = redis_warnings({**good, **info})
    assert said in warning


async def test_store_that_does_not_answer(bench: Bench, boss: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*args: Any, **kwargs: Any) -> Any:
        raise StoreUnavailable("Redis does not answer.")

    for name in ("now_ms", "workers", "view", "list"):
        monkeypatch.setattr(type(bench.gateway), name, fails)
    for url in (LIST, one("r-1"), WORKERS, ENDINGS, HEALTH):
        assert "Redis does not answer." in await text(boss, url, status=503)


async def test_without_a_started_gateway(boss: AsyncClient) -> None:
    assert not runtime.started()
    assert 'role="alert"' in await text(boss, LIST, status=503)


async def test_who_may_see_what(bench: Bench, browser_of: Callable[..., Any]) -> None:
    await bench.submit("r-1")
    urls = (LIST, one("r-1"), WORKERS, ENDINGS, HEALTH)
    stranger, nobody = AsyncClient(), await browser_of("nobody", is_staff=False)
    no_rights = await browser_of("staff")
    viewer = await browser_of("viewer", "view_inflight")
    for url in urls:
        for outsider in (stranger, nobody):
            page = await outsider.get(url)
            assert page.status_code == 302 and "/login/" in page["Location"]
        assert (await no_rights.get(url)).status_code == 403
        page = await viewer.get(url)
        assert page.status_code == 200
        for word in ("Cancel selected", "Cancel all", "Cancel this", ">drain<", ">quiet<", "Show prompt"):
            assert word not in page.content.decode(), (url, word)
    for name in ("cancel", "command"):
        data = {"id": "r-1", "confirmed": "yes", "kind": "worker", "target": WORKER, "verb": "drain"}
        url = reverse(f"admin:inflight_inflightrequest_{name}")
        assert (await viewer.post(url, data)).status_code == 403
        assert (await stranger.post(url, data)).status_code == 302
        assert (await viewer.get(url)).status_code == 405
    assert (await viewer.put(HEALTH)).status_code == 405
    assert await bench.gateway.view("r-1") is not None
    assert "requests in flight" in (await viewer.get("/admin/")).content.decode().lower()
    assert "inflight" not in (await no_rights.get("/admin/")).content.decode()


async def test_an_owner_that_is_nearly_a_number(bench: Bench, boss: AsyncClient) -> None:
    await bench.submit("r", owner="user:²")
    assert "user:²" in await text(boss, LIST)
