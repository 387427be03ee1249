"""Usage records: each ended request counted once, whoever ends it and whatever dies on the way."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import threading
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import DatabaseError
from django.test import Client
from django.urls import reverse

from apps.accounts import services, usage
from apps.accounts.models import UsageBatch, UsageRecord
from apps.accounts.usage import UsageCollector, add
from apps.api.models import KeptResponse
from inference.config import Config
from inference.lifecycle import Outcome, Reason
from inference.messages import Job, SamplingParams
from inference.store.records import Submission
from inference.store.store import Append, RequestStore
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)

DAY = date(2026, 3, 1)


@pytest.fixture
async def collectors(config: Config) -> AsyncIterator[list[UsageCollector]]:
    made = [UsageCollector(config) for _ in range(3)]
    for collector in made:
        collector._redis.start()
    yield made
    for collector in made:
        await collector._redis.stop()


def spec(name: str, owner: str, model: str = "scripted", prompt: int = 3) -> Submission:
    return Submission(
        job=Job(name, model, [1] * prompt, SamplingParams(max_tokens=9)),
        endpoint="chat", transport="sse", owner=owner, client="", priority="normal", timeout=60.0, resumable=False,
    )  # fmt: skip


async def used(store: RequestStore, name: str, owner: str, tokens: int = 0, **extra: Any) -> None:
    """A request from its submission to its end."""
    await store.submit(spec(name, owner, **extra), server="s-1", slots=4)
    if tokens:
        [claim] = await store.claim(extra.get("model", "scripted"), "w-1", 1)
        assert claim.id == name
        await store.append("w-1", [Append(name, 1, 1, b"", tokens, "", "s-1")], [])
    await store.settle(name, Outcome.cancelled(Reason.USER))


async def records() -> dict[tuple[str, str], tuple[int, int, int]]:
    return {
        (r.owner, r.model): (r.requests, r.prompt_tokens, r.generated_tokens) async for r in UsageRecord.objects.all()
    }


async def test_each_request_counts_once_however_often_it_is_settled(store: Any, collectors: Any, redis: Any) -> None:
    await used(store, "a", "key:ab", 5)
    await used(store, "b", "key:ab", 0)
    await used(store, "c", "user:1", 2, prompt=7)
    await used(store, "d", "key:ab", 1, model="odd|name")
    for _ in range(3):
        await asyncio.gather(*(store.settle(i, Outcome.failed(Reason.WORKER_LOST)) for i in "abcd"))
    assert await collectors[0].collect() == 3
    expected = {
        ("key:ab", "scripted"): (2, 6, 5),
        ("user:1", "scripted"): (1, 7, 2),
        ("key:ab", "odd|name"): (1, 3, 1),
    }
    assert await records() == expected
    assert {r.day async for r in UsageRecord.objects.all()} == {datetime.now(UTC).date()}
    assert await collectors[0].collect() == 0
    await used(store, "e", "key:ab", 4)
    await collectors[1].collect()
    assert await records() == {**expected, ("key:ab", "scripted"): (3, 9, 9)}
    assert not await redis.exists("sluice:usage", "sluice:usage:batch")


async def test_servers_that_collect_at_the_same_time_add_each_batch_once(store: Any, collectors: Any) -> None:
    async def load(worker: int) -> None:
        for i in range(30):
            await used(store, f"{worker}-{i}", f"key:{worker % 3}")

    async def collect(collector: UsageCollector) -> None:
        while not done.is_set():
            with contextlib.suppress(DatabaseError):  # SQLite in memory does not wait for a lock
                await collector.collect()
            await asyncio.sleep(0)

    done = asyncio.Event()
    tasks = [asyncio.create_task(collect(c)) for c in collectors]
    await asyncio.gather(*(load(w) for w in range(6)))
    done.set()
    await asyncio.gather(*tasks)
    while await collectors[0].collect():
        pass
    assert await records() == {(f"key:{n}", "scripted"): (60, 180, 0) for n in range(3)}


@pytest.mark.parametrize("where", ["before the database", "after the database"])
async def test_server_that_dies_in_between_neither_loses_nor_doubles(
    store: Any, collectors: Any, redis: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    await used(store, "a", "key:ab", 5)
    real = usage._add_and_close

    def dies(*args: Any) -> None:
        if where == "after the database":
            real(*args)
        raise DatabaseError("the process is gone")

    monkeypatch.setattr(usage, "_add_and_close", dies)
    with pytest.raises(DatabaseError):
        await collectors[0].collect()
    monkeypatch.undo()
    await used(store, "b", "key:ab", 2)
    await collectors[1].collect()  # the batch of the dead one
    await collectors[1].collect()  # what came after it
    assert await records() == {("key:ab", "scripted"): (2, 6, 7)}
    assert not await redis.exists("sluice:usage", "sluice:usage:batch")


async def test_late_server_does_not_drop_the_next_batch(store: Any, collectors: Any, redis: Any) -> None:
    await used(store, "a", "key:ab")
    await collectors[0].collect()
    await used(store, "b", "key:ab")
    flat = await redis.eval(usage.TAKE.source, 2, "sluice:usage", "sluice:usage:batch", "second")
    assert b"second" in flat
    assert await redis.eval(usage.DONE.source, 1, "sluice:usage:batch", "first") == 0
    assert await redis.exists("sluice:usage:batch")


async def test_running_collector_records_at_its_stop_what_was_ended_last(store: Any, config: Config) -> None:
    collector = UsageCollector(config)
    collector.start()
    await used(store, "a", "user:7", 1)
    await collector.stop()
    await collector.stop()
    assert await records() == {("user:7", "scripted"): (1, 3, 1)}


async def test_stop_waits_for_the_round_under_way(store: Any, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that was cancelled went on in its thread, and the last one failed beside it on a locked table."""
    entered, go, inside, most = threading.Event(), threading.Event(), 0, 0
    write = usage._add_and_close

    def slow(*args: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        entered.set()
        go.wait(10)
        write(*args)
        inside -= 1

    monkeypatch.setattr(usage, "_add_and_close", slow)
    await used(store, "a", "user:7", 1)
    collector = UsageCollector(config)
    collector.start()
    assert await asyncio.to_thread(entered.wait, 10)
    stopping = asyncio.create_task(collector.stop(20))
    await asyncio.sleep(0)
    go.set()
    await stopping
    assert most == 1
    assert await records() == {("user:7", "scripted"): (1, 3, 1)}


async def test_running_collector_deletes_what_is_past_its_time(config: Config) -> None:
    past = datetime(2020, 1, 1, tzinfo=UTC)
    await KeptResponse.objects.acreate(id="r", owner="key:x", expires_at=past, conversation=[], response={})
    collector = UsageCollector(config)
    collector.start()

    async def gone() -> bool:
        return not await KeptResponse.objects.aexists()

    await eventually(gone)
    await collector.stop()


async def test_database_away_is_said_once_and_made_up_for(
    store: Any, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def away(*args: Any) -> None:
        nonlocal tries
        tries += 1
        raise DatabaseError

    await used(store, "a", "user:7")
    with monkeypatch.context() as patch:
        patch.setattr(usage, "_add_and_close", away)
        patch.setattr(usage, "INTERVAL", 0.01)
        collector = UsageCollector(config)
        collector.start()
        await eventually(lambda: tries >= 5)
        await collector.stop()
        assert [r.message for r in caplog.records] == ["usage waits in Redis (DatabaseError)"]
    again = UsageCollector(config)
    again.start()
    await again.stop()
    assert await records() == {("user:7", "scripted"): (1, 3, 0)}


# --- Reading ---


def fill() -> str:
    made = services.create_key(None, name='=HYPERLINK("x")')
    owner = f"key:{made.key.prefix}"
    one = {"requests": 2, "prompt_tokens": 30, "generated_tokens": 4}
    assert add("b1", {(DAY, owner, "demo"): one, (date(2026, 3, 2), "user:99", "demo"): one})
    assert not add("b1", {(DAY, owner, "demo"): one})
    assert add("b2", {(DAY, owner, "demo"): one})
    assert UsageBatch.objects.count() == 2
    return owner


def test_command_writes_csv_that_no_spreadsheet_runs() -> None:
    owner = fill()
    out = io.StringIO()
    call_command("usage", stdout=out)
    lines = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [line["day"] for line in lines] == ["2026-03-01", "2026-03-02"]
    assert lines[0]["owner"] == owner and lines[0]["name"] == '\'=HYPERLINK("x")'
    assert (lines[0]["requests"], lines[0]["prompt_tokens"], lines[0]["generated_tokens"]) == ("4", "60", "8")
    for options, days in (
        ({"since": date(2026, 3, 2)}, ["2026-03-02"]),
        ({"until": DAY}, ["2026-03-01"]),
        ({"owner": "user:99"}, ["2026-03-02"]),
    ):
        out = io.StringIO()
        call_command("usage", stdout=out, **options)
        assert [line["day"] for line in csv.DictReader(io.StringIO(out.getvalue()))] == days


def test_admin_shows_and_exports_and_changes_nothing(client: Client) -> None:
    owner = fill()
    staff = User.objects.create_user("op", password="x", is_staff=True)
    client.force_login(staff)
    url = reverse("admin:accounts_usagerecord_changelist")
    assert client.get(url).status_code == 403
    staff.user_permissions.add(Permission.objects.get(codename="view_usagerecord"))
    page = client.get(url)
    assert page.status_code == 200
    assert owner in page.content.decode() and "=HYPERLINK(&quot;x&quot;)" in page.content.decode()
    ids = list(UsageRecord.objects.values_list("pk", flat=True))
    reply = client.post(url, {"action": "export_csv", "_selected_action": ids})
    assert reply["Content-Type"].startswith("text/csv") and "attachment" in reply["Content-Disposition"]
    assert len(reply.content.decode().splitlines()) == 3
    for name in ("add", "change", "delete"):
        args = [] if name == "add" else [ids[0]]
        reply = client.post(reverse(f"admin:accounts_usagerecord_{name}", args=args), {"requests": 0})
        assert reply.status_code == 403, name
    assert UsageRecord.objects.get(owner=owner).requests == 4


# --- One's own page ---


def test_page_shows_ones_own_usage_and_nobody_elses(client: Client) -> None:
    ann, eve = (User.objects.create_user(name, password="x") for name in ("ann", "eve"))
    key, revoked, hers = (
        services.create_key(None, name=n, user=u).key for n, u in (("a", ann), ("b", ann), ("e", eve))
    )
    services.revoke_key(None, revoked)
    today = datetime.now(UTC).date()
    yesterday, long_ago = today - timedelta(days=1), today - timedelta(days=40)

    def counts(requests: int) -> dict[str, int]:
        return {"requests": requests, "prompt_tokens": 10 * requests, "generated_tokens": 100 * requests}

    assert add(
        "b1",
        {
            (today, f"user:{ann.pk}", "demo"): counts(1),
            (today, f"key:{key.prefix}", "demo"): counts(2),
            (today, f"key:{revoked.prefix}", "<b>odd"): counts(4),
            (yesterday, f"key:{key.prefix}", "demo"): counts(8),
            (long_ago, f"key:{key.prefix}", "demo"): counts(16),
            (today, f"user:{eve.pk}", "demo"): counts(1000),
            (today, f"key:{hers.prefix}", "secret"): counts(1000),
        },
    )
    url = reverse("usage")
    assert client.get(url).status_code == 302 and "login" in client.get(url)["Location"]
    client.force_login(ann)
    page = client.get(url)
    shown = [(r["day"], r["model"], r["requests"], r["prompt_tokens"]) for r in page.context["rows"]]
    assert shown == [(today, "<b>odd", 4, 40), (today, "demo", 3, 30), (yesterday, "demo", 8, 80)]
    assert page.context["total"] == counts(15)
    text = page.content.decode()
    assert "&lt;b&gt;odd" in text and "secret" not in text and "1000" not in text
    assert "no-store" in page["Cache-Control"]
    assert client.get(url, {"days": "90"}).context["total"] == counts(31)
    assert client.get(url, {"days": "7"}).context["days"] == 7
    assert client.get(url, {"days": "9999999999"}).context["days"] == 30
    assert client.post(url).status_code == 405
    assert reverse("usage") in client.get(reverse("api_keys")).content.decode()


async def test_page_follows_what_has_just_ended(store: Any, collectors: Any, async_client: Any) -> None:
    ann = await User.objects.acreate(username="ann")
    await async_client.aforce_login(ann)
    await used(store, "a", f"user:{ann.pk}", 5)
    await collectors[0].collect()
    page = await async_client.get(reverse("usage"))
    assert page.context["total"] == {"requests": 1, "prompt_tokens": 3, "generated_tokens": 5}
