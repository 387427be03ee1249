"""Cancel and orders: confirmation, permission, log, two operators at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.exceptions import PermissionDenied
from django.test import AsyncClient
from django.urls import reverse
from msgspec import structs

from apps.inflight import services
from inference.errors import StoreUnavailable
from inference.lifecycle import Reason
from inference.messages import Frame, ServerBeat, WorkerCommand, decode_worker_message, encode
from inference.store.store import Append
from sluice import runtime
from tests.apps.inflight.conftest import SERVER, WORKER, Bench

CANCEL = reverse("admin:inflight_inflightrequest_cancel")
COMMAND = reverse("admin:inflight_inflightrequest_command")
WORKERS = reverse("admin:inflight_inflightrequest_workers")


async def alive(bench: Bench) -> list[str]:
    return sorted(v.id for v in (await bench.gateway.list(0, 1000)).items)


async def messages_of(browser: AsyncClient, page: Any) -> str:
    return (await browser.get(page["Location"])).content.decode()


async def test_cancel_selected_asks_acts_and_logs(bench: Bench, boss: AsyncClient) -> None:
    for name in ("a", "b", "c"):
        await bench.submit(name)
    ask = await boss.post(CANCEL, {"id": ["a", "b"], "keep": "sort=id"})
    assert ask.status_code == 200 and "cannot be undone" in ask.content.decode()
    assert await alive(bench) == ["a", "b", "c"]
    data = {"id": ["a", "b", "gone"], "keep": "sort=id", "confirmed": "yes", "reason": "runaway <b>"}
    done = await boss.post(CANCEL, data)
    assert done.status_code == 302 and done["Location"].endswith("?sort=id")
    assert "2 cancelled, 1 had ended before" in await messages_of(boss, done)
    assert await alive(bench) == ["c"]
    entries = [e async for e in LogEntry.objects.select_related("user", "content_type")]
    assert sorted(e.object_id for e in entries) == ["a", "b"]
    assert {e.user.username for e in entries} == {"boss"}
    assert all("runaway <b>" in e.change_message for e in entries)
    assert all(e.get_admin_url() for e in entries)
    assert [e.reason for e in await bench.gateway.history()] == ["admin", "admin"]
    assert "<b>" not in (await boss.get("/admin/")).content.decode().split("recent-actions-module")[1]
    log = (await boss.get("/admin/admin/logentry/")).content.decode()
    assert log.count("runaway &lt;b&gt;") == 2 and "runaway <b>" not in log
    for page in ("add/", f"{entries[0].pk}/delete/"):
        assert (await boss.get(f"/admin/admin/logentry/{page}")).status_code == 403


async def test_cancel_all_that_match_at_the_moment_of_confirmation(bench: Bench, boss: AsyncClient) -> None:
    for i in range(60):
        await bench.submit(f"mine-{i}", owner="user:1")
        await bench.submit(f"theirs-{i}", owner="user:2")
    ask = await boss.post(CANCEL, {"all": "1", "keep": "owner=user:1&page=2"})
    assert "60 just now" in ask.content.decode() and "owner user:1" in ask.content.decode()
    await bench.submit("mine-late", owner="user:1")
    done = await boss.post(CANCEL, {"all": "1", "keep": "owner=user:1&page=2", "confirmed": "yes"})
    assert "61 cancelled" in await messages_of(boss, done)
    assert len(await alive(bench)) == 60 and all(i.startswith("theirs") for i in await alive(bench))
    assert await LogEntry.objects.acount() == 61


async def test_cancel_all_without_a_filter_says_so(bench: Bench, boss: AsyncClient) -> None:
    """Also where it is one just now: there may be more at the moment of confirmation."""
    await bench.submit("only")
    asked = (await boss.post(CANCEL, {"all": "1", "keep": ""})).content.decode()
    assert "Cancel requests?" in asked and "<strong>all requests</strong>" in asked
    single = (await boss.post(CANCEL, {"id": "only"})).content.decode()
    assert "Cancel this request?" in single


async def test_nothing_selected(bench: Bench, boss: AsyncClient) -> None:
    for data in ({}, {"all": "1", "keep": "owner=nobody"}):
        page = await boss.post(CANCEL, {**data, "confirmed": "yes"})
        assert "Nothing to cancel" in await messages_of(boss, page)


async def test_two_operators_cancel_the_same_requests_at_once(bench: Bench, browser_of: Callable[..., Any]) -> None:
    ids = [f"r-{i}" for i in range(40)]
    for name in ids:
        await bench.submit(name)
    rights = ("view_inflight", "cancel_request")
    ann, bob = await browser_of("ann", *rights), await browser_of("bob", *rights)
    results = await asyncio.gather(
        services.cancel_requests(ann.user, bench.gateway, ids, "a"),
        services.cancel_requests(bob.user, bench.gateway, ids, "b"),
    )
    assert sorted(results[0].done + results[1].done) == sorted(ids), "each was cancelled by exactly one"
    assert await LogEntry.objects.acount() == len(ids)
    assert await bench.gateway.outcomes() == {"cancelled:admin": len(ids)}


async def test_service_refuses_without_the_permission(bench: Bench, browser_of: Callable[..., Any]) -> None:
    await bench.submit("a")
    viewer = await browser_of("viewer", "view_inflight")
    with pytest.raises(PermissionDenied):
        await services.cancel_requests(viewer.user, bench.gateway, ["a"], "")
    with pytest.raises(PermissionDenied):
        await services.command(viewer.user, bench.gateway, "worker", WORKER, "drain")
    assert await alive(bench) == ["a"]


async def test_what_was_cancelled_before_an_error_is_logged(
    bench: Bench, boss: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.submit("a")
    real = bench.gateway.cancel

    async def cancel(request_id: str, reason: Reason) -> Any:
        if request_id == "b":
            raise StoreUnavailable("Redis does not answer.")
        return await real(request_id, reason)

    monkeypatch.setattr(bench.gateway, "cancel", cancel)
    with pytest.raises(StoreUnavailable):
        await services.cancel_requests(boss.user, bench.gateway, ["a", "b"], "")  # type: ignore[attr-defined]
    assert [e.object_id async for e in LogEntry.objects.all()] == ["a"]


@pytest.mark.parametrize("dead", ["worker", "server"])
async def test_a_record_whose_owner_is_dead_can_be_cleared(bench: Bench, boss: AsyncClient, dead: str) -> None:
    k, call = bench.store.keys, bench.store.redis.call
    await bench.submit("r-1")
    await bench.beat("w-dead")
    await bench.claim(worker="w-dead")
    await call("DEL", k.worker_beat("w-dead") if dead == "worker" else k.server_beat(SERVER))
    data = {"all": "1", "keep": "phase=orphaned", "confirmed": "yes"}
    assert "1 cancelled, 0 had ended before" in await messages_of(boss, await boss.post(CANCEL, data))
    assert await alive(bench) == []
    assert not await call("EXISTS", k.of_worker("w-dead")) and not await call("EXISTS", k.of_server(SERVER))
    assert (await bench.gateway.audit()).clean


async def test_cancel_needs_csrf(bench: Bench, boss: AsyncClient) -> None:
    await bench.submit("a")
    strict = AsyncClient(enforce_csrf_checks=True)
    await strict.aforce_login(boss.user)  # type: ignore[attr-defined]
    assert (await strict.post(CANCEL, {"id": "a", "confirmed": "yes"})).status_code == 403
    assert (await strict.post(COMMAND, {"confirmed": "yes"})).status_code == 403
    assert await alive(bench) == ["a"]


async def test_orders_to_workers_and_servers(bench: Bench, boss: AsyncClient, redis: Any) -> None:
    data = {"kind": "worker", "target": WORKER, "verb": "quiet"}
    ask = await boss.post(COMMAND, data)
    assert ask.status_code == 200 and "until it is resumed" in ask.content.decode()
    deaf = await boss.post(COMMAND, {**data, "confirmed": "yes"})
    assert "is there to hear it" in await messages_of(boss, deaf)
    async with redis.pubsub() as listener:
        await listener.subscribe(bench.store.keys.worker_channel(WORKER))
        await listener.get_message(timeout=5)
        told = await boss.post(COMMAND, {**data, "confirmed": "yes"})
        heard = await listener.get_message(ignore_subscribe_messages=True, timeout=5)
    assert decode_worker_message(heard["data"]) == WorkerCommand("quiet")
    assert "was told to quiet" in await messages_of(boss, told)
    entry = await LogEntry.objects.aget()
    assert (entry.object_id, entry.change_message) == (f"worker {WORKER}", "Told to quiet.")
    server = {"kind": "server", "target": bench.gateway.id, "verb": "drain", "confirmed": "yes"}
    assert "was told to drain" in await messages_of(boss, await boss.post(COMMAND, server))
    for bad in ({"verb": "explode"}, {"kind": "pool"}, {"kind": "server", "verb": "quiet"}):
        assert (await boss.post(COMMAND, {**data, **bad, "confirmed": "yes"})).status_code == 400
    gone = await boss.post(COMMAND, {**data, "target": "w-nobody", "confirmed": "yes"})
    assert "is there to hear it" in await messages_of(boss, gone)


async def test_orders_that_are_offered_are_those_that_do_something(bench: Bench, boss: AsyncClient) -> None:
    wanted: dict[Any, str] = {
        "ready": "quiet drain restart", "quiet": "resume drain restart", "draining": "restart",
        "starting": "drain restart",
    }  # fmt: skip
    for state, orders in wanted.items():
        await bench.beat(state=state)
        page = (await boss.get(WORKERS)).content.decode()
        assert re.findall(rf'aria-label="(\w+) worker {WORKER}"', page) == orders.split(), state
    assert re.findall(rf'aria-label="(\w+) server {SERVER}"', page) == ["drain"]
    server = ServerBeat(SERVER, "host", 5, "finishing", {}, 0, 0, 1, "1")
    assert services.server_orders(server) == ["undrain"]
    assert services.server_orders(structs.replace(server, drain_left_seconds=9.0)) == [], "a signal told it to leave"
    assert services.server_orders(structs.replace(server, state="ending")) == []


def text_url(request_id: str) -> str:
    return reverse("admin:inflight_inflightrequest_text", args=(request_id,))


async def test_text_needs_a_permission_of_its_own_and_each_look_is_logged(
    bench: Bench, boss: AsyncClient, browser_of: Callable[..., Any]
) -> None:
    await bench.submit("r1", prompt_text="<b>a secret question</b>")
    await bench.claim()
    frame = encode(Frame(1, [5], "the <i>answer"))
    await bench.store.append(WORKER, [Append("r1", 1, 1, frame, 1, "", SERVER)], [])
    operator = await browser_of("operator", "view_inflight", "cancel_request", "drain_server")
    assert (await operator.post(text_url("r1"))).status_code == 403
    assert (await boss.get(text_url("r1"))).status_code == 405
    one = reverse("admin:inflight_inflightrequest_change", args=("r1",))
    assert "Show prompt" not in (await operator.get(one)).content.decode()
    assert "Show prompt" in (await boss.get(one)).content.decode()
    assert await LogEntry.objects.acount() == 0
    page = (await boss.post(text_url("r1"))).content.decode()
    assert "&lt;b&gt;a secret question&lt;/b&gt;" in page and "the &lt;i&gt;answer" in page
    entry = await LogEntry.objects.select_related("user").aget()
    assert (entry.object_id, entry.change_message) == ("r1", "Read its prompt and answer.")
    assert (await boss.post(text_url("gone"))).status_code == 404
    assert await LogEntry.objects.acount() == 1


async def test_prompt_of_token_ids_is_decoded(bench: Bench, boss: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def decode(self, ids: list[int], skip_special: bool = True) -> str:
            return f"{ids} {skip_special}"

    async def tokenizer(alias: str) -> Tokenizer:
        assert alias == "scripted"
        return Tokenizer()

    monkeypatch.setattr(runtime, "tokenizer", tokenizer)
    await bench.submit("r1")
    found = await services.read_text(boss.user, bench.gateway, "r1")  # type: ignore[attr-defined]
    assert found is not None
    assert (found.prompt, found.answer, found.parameters["max_tokens"]) == ("[1, 2, 3] False", "", 50)
