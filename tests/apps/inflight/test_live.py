"""The event stream: diffs, endings, permissions, its end."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.http import QueryDict
from django.test import AsyncClient
from django.urls import reverse

from apps.accounts import services as account_services
from apps.inflight import consumers
from apps.inflight.feed import Feed
from apps.inflight.query import PER_PAGE, Query
from inference.errors import StoreUnavailable
from inference.lifecycle import Reason
from sluice import runtime
from sluice.status import ServerState
from tests.apps.inflight.conftest import Bench

pytestmark = pytest.mark.django_db(transaction=True)


async def test_first_everything_then_only_changes(bench: Bench) -> None:
    await bench.submit("a")
    await bench.submit("b")
    feed = Feed(bench.gateway, Query())
    first = await feed.update()
    assert first["reset"] and first["order"] == ["b", "a"]
    assert first["counts"] == {"total": 2, "matched": 2, "page": 1, "pages": 1}
    assert first["cells"]["a"]["phase"]["text"] == "queued, place 1" and first["cells"]["a"]["age"]["since"] > 0
    assert list(await feed.update()) == ["now"], "nothing changed: nothing but the clock"
    await bench.claim(1)
    change = await feed.update()
    assert set(change) == {"now", "cells"} and set(change["cells"]) == {"a", "b"}
    assert set(change["cells"]["b"]) == {"phase"}, "it moved up in the queue"
    await bench.token("a", 1)
    change = await feed.update()
    assert set(change["cells"]) == {"a"} and change["cells"]["a"]["generated"] == {"text": "1 / 50"}


async def test_ending_is_told_before_the_row_goes(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        await bench.submit(name)
    feed = Feed(bench.gateway, Query())
    await feed.update()
    await bench.gateway.cancel("b", Reason.ADMIN)
    change = await feed.update()
    assert change["ended"] == {"b": "cancelled (admin)"} and change["order"] == ["c", "a"]
    assert change["cells"]["b"] == {"generated": {"text": "0"}}, "with all that it had given by then"
    assert change["counts"]["total"] == 2


async def test_row_that_only_moved_to_the_next_page_has_not_ended(bench: Bench) -> None:
    for i in range(PER_PAGE):
        await bench.submit(f"r-{i}")
    feed = Feed(bench.gateway, Query())
    await feed.update()
    await bench.submit("late")
    change = await feed.update()
    assert change["order"][0] == "late" and "r-0" not in change["order"] and "ended" not in change
    await bench.store.redis.call("DEL", bench.store.keys.request("r-1"))
    await bench.store.redis.call("ZREM", bench.store.keys.live, "r-1")
    assert (await feed.update())["ended"] == {"r-1": "ended"}, "gone, and nobody remembers how"


async def test_five_thousand_rows_cost_a_page(bench: Bench) -> None:
    import asyncio

    await asyncio.gather(*(bench.submit(f"r-{i}") for i in range(5000)))
    feed = Feed(bench.gateway, Query())
    first = await feed.update()
    assert first["counts"]["total"] == 5000 and len(first["cells"]) == PER_PAGE
    assert len(json.dumps(first)) < 60_000
    filtered = await Feed(bench.gateway, Query(q="r-49", sort="-id")).update()
    assert filtered["counts"]["matched"] == 111  # 49, 490-499, 4900-4999
    assert filtered["order"][0] == "r-4999"


@asynccontextmanager
async def opened(browser: AsyncClient, query: str = "", headers: Any = ()) -> AsyncIterator[ApplicationCommunicator]:
    from sluice.asgi import application

    cookie = "; ".join(f"{k}={v.value}" for k, v in browser.cookies.items())
    scope = {
        "type": "http", "method": "GET", "path": "/inflight/live", "raw_path": b"/inflight/live",
        "query_string": query.encode(), "scheme": "http", "http_version": "1.1", "server": ("testserver", 80),
        "client": ("127.0.0.1", 1), "headers": [(b"host", b"testserver"), (b"cookie", cookie.encode()), *headers],
    }  # fmt: skip
    stream = ApplicationCommunicator(application, scope)
    await stream.send_input({"type": "http.request", "body": b"", "more_body": False})
    try:
        yield stream
    finally:
        await stream.send_input({"type": "http.disconnect"})
        await stream.wait(5)


async def status(stream: ApplicationCommunicator) -> int:
    return (await stream.receive_output(5))["status"]


async def events(stream: ApplicationCommunicator) -> AsyncIterator[dict[str, Any]]:
    while True:
        message = await stream.receive_output(10)
        for line in message.get("body", b"").split(b"\n\n"):
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
        if not message.get("more_body"):
            return


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "INTERVAL", 0.05)


async def test_stream_follows_the_filter(bench: Bench, boss: AsyncClient) -> None:
    await bench.submit("mine", owner="user:1")
    await bench.submit("theirs", owner="user:2")
    async with opened(boss, "owner=user:1") as stream:
        assert await status(stream) == 200
        source = events(stream)
        assert (await anext(source))["order"] == ["mine"]
        await bench.gateway.cancel("mine", Reason.USER)
        async for message in source:
            if "ended" in message:
                assert message["ended"] == {"mine": "cancelled (user)"}
                break


async def test_who_may_listen(bench: Bench, browser_of: Callable[..., Any]) -> None:
    admin = await sync_to_async(account_services.create_key)(None, name="x", scopes=["admin"])
    plain = await sync_to_async(account_services.create_key)(None, name="x")
    anybody = AsyncClient()
    key = [(b"authorization", f"Bearer {admin.secret}".encode())]
    wrong = [(b"authorization", f"Bearer {plain.secret}".encode())]
    for browser, headers, wanted in (
        (anybody, (), 401),
        (await browser_of("nobody", is_staff=False), (), 403),
        (await browser_of("staff"), (), 403),
        (await browser_of("viewer", "view_inflight"), (), 200),
        (anybody, key, 200),
        (anybody, wrong, 403),
    ):
        async with opened(browser, headers=headers) as stream:
            assert await status(stream) == wanted


@pytest.mark.parametrize("what", ["permission", "staff", "signed out", "key"])
async def test_stream_ends_with_the_right_to_see_it(
    bench: Bench, browser_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whoever was let in once went on seeing everybody's requests for two minutes."""
    monkeypatch.setattr(consumers, "ASK_AGAIN", 0.1)
    viewer = await browser_of("viewer", "view_inflight")
    made = await sync_to_async(account_services.create_key)(None, name="x", scopes=["admin"])
    key = [(b"authorization", f"Bearer {made.secret}".encode())]
    async with opened(AsyncClient() if what == "key" else viewer, headers=key if what == "key" else ()) as stream:
        assert await status(stream) == 200
        source = events(stream)
        for _ in range(10):  # asked meanwhile, and still let see
            assert "now" in await anext(source)
        if what == "permission":
            await viewer.user.user_permissions.aclear()
        elif what == "staff":
            viewer.user.is_staff = False
            await viewer.user.asave()
        elif what == "signed out":
            await viewer.alogout()
        else:
            await sync_to_async(account_services.revoke_key)(None, made.key)
        assert [m async for m in source][-1] == {"bye": True}


async def test_stream_ends_when_the_server_leaves_and_after_its_lifetime(
    bench: Bench, boss: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(boss) as stream:
        assert await status(stream) == 200
        source = events(stream)
        await anext(source)
        monkeypatch.setattr(runtime.status, "state", ServerState.PAUSING)
        assert [m async for m in source][-1] == {"bye": True}
    monkeypatch.setattr(runtime.status, "state", ServerState.SERVING)
    monkeypatch.setattr(consumers, "LIFETIME", 0.0)
    async with opened(boss) as stream:
        assert await status(stream) == 200
        assert [m async for m in events(stream)][-1] == {"bye": True}


async def test_redis_away_for_a_while(bench: Bench, boss: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(boss) as stream:
        assert await status(stream) == 200
        source = events(stream)
        await anext(source)
        real = bench.gateway.list

        async def fails(*args: Any, **kwargs: Any) -> Any:
            raise StoreUnavailable("Redis does not answer.")

        monkeypatch.setattr(bench.gateway, "list", fails)
        async for message in source:
            if "problem" in message:
                break
        monkeypatch.setattr(bench.gateway, "list", real)
        async for message in source:
            if "now" in message:
                break


async def test_a_query_with_too_many_fields_is_refused(bench: Bench, boss: AsyncClient) -> None:
    """Before, Django's own limit on fields ended in a 500."""
    async with opened(boss, "&".join(f"f{n}=1" for n in range(1500))) as stream:
        assert await status(stream) == 400


async def test_the_page_of_one_request_follows_it_among_many_of_like_names(bench: Bench, boss: AsyncClient) -> None:
    """``r`` is part of sixty other ids, all of them newer."""
    for name in ("r", *(f"r-{i}" for i in range(PER_PAGE + 10))):
        await bench.submit(name)
    page = (await boss.get(reverse("admin:inflight_inflightrequest_change", args=["r"]))).content.decode()
    live = re.search(r'data-live="/inflight/live\?([^"]*)"', page)
    assert live is not None
    feed = Feed(bench.gateway, Query.parse(QueryDict(live[1])))
    assert (await feed.update())["order"] == ["r"]
    await bench.gateway.cancel("r", Reason.ADMIN)
    assert (await feed.update())["ended"] == {"r": "cancelled (admin)"}
