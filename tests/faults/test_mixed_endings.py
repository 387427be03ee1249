"""Every kind of ending in one run, with what breaks: the admin page, Redis and the metrics say the same throughout.

Guards: gauges that are read and not kept (a gauge that is counted down only by a
good ending fails after the first class), endings that are counted once
(``ledger.balance`` after each class), the admin page's own counts.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.faults.harness import Rig, Server, parallel
from tests.faults.transports import TRANSPORTS, Call
from tests.support import eventually

SCALE = float(os.environ.get("SLUICE_SCALE", "0.1"))
COUNT = max(5, int(100 * SCALE))
MODELS = (
    f"scripted=scripted:rate=100,faults=1,context=100000,slots={max(16, 2 * COUNT)} "
    "narrow=scripted:rate=50,slots=1,prefill=1,context=100000"
)
LIST, HEALTH = "/admin/inflight/inflightrequest/", "/admin/inflight/inflightrequest/health/"
PASSWORD = "of-the-operator-1"


async def operator(rig: Rig, server: Server, stack: AsyncExitStack) -> httpx.AsyncClient:
    """A browser that is signed in to the admin."""
    status, out = await rig.command(
        "createsuperuser", "--noinput", "--username", "op", "--email", "op@example.org",
        DJANGO_SUPERUSER_PASSWORD=PASSWORD,
    )  # fmt: skip
    assert status == 0, out
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20)
    await stack.enter_async_context(client)
    await client.get("/admin/login/")
    form = {"username": "op", "password": PASSWORD, "csrfmiddlewaretoken": client.cookies["csrftoken"]}
    signed_in = await client.post("/admin/login/?next=/admin/", data=form)
    assert signed_in.status_code == 302, signed_in.text[-500:]
    return client


async def shown(browser: httpx.AsyncClient) -> int:
    """How many are in flight, by the admin page."""
    page = await browser.get(LIST)
    assert page.status_code == 200, page.text[-500:]
    found = re.search(r'data-count="total">(\d+)<', page.text)
    assert found
    return int(found[1])


async def everywhere(rig: Rig, server: Server, browser: httpx.AsyncClient) -> set[float]:
    """In flight by the admin page, by the index and the queues and sets in Redis, and by the gauge."""
    sample = await server.scrape()
    held = 0
    for model in ("scripted", "narrow"):
        held += await rig.views.queue_depth(model) + await rig.views.running(model)
    return {await shown(browser), await rig.views.count(), held, sample.sum("sluice_requests_inflight")}


@pytest.mark.timeout(600)
async def test_me_05_all_endings_with_a_killed_worker_and_redis_down(make_rig: Callable[..., Any]) -> None:
    """ME-05: after each class of endings nothing is in flight, by anybody's account, and the sums are right."""
    rig: Rig = await make_rig(SLUICE_MODELS=MODELS, SLUICE_REDIS_TIMEOUT=1, SLUICE_MAX_QUEUED=1000)
    _, server = await asyncio.gather(rig.pool(), rig.server())
    expected: dict[tuple[str, str], int] = {}

    def kind(number: int) -> str:
        return TRANSPORTS[number % len(TRANSPORTS)]

    async def finished(number: int) -> None:
        assert (await (await Call.begin(rig, server, kind(number), 5, find=False)).finish()).done

    async def invalid(number: int) -> None:
        exchange = await server.post("/v1/completions", {"model": "scripted", "prompt": "x", "max_tokens": -1})
        assert exchange.status == 400
        await exchange.close()

    async def failed(number: int) -> None:
        call = await Call.begin(rig, server, kind(number), 50, prompt="[[error@2]]", find=False)
        assert (await call.finish()).error is not None

    async def gone(call: Call, phase: str) -> None:
        await eventually(lambda: _phase(rig, call.id, phase), 30, what=phase)
        await call.leave()

    async def gone_in_queue(number: int) -> None:
        await gone(await Call.begin(rig, server, _named(number), 50_000, model="narrow"), "queued")

    async def gone_in_prefill(number: int) -> None:
        # A second for 1,000 tokens of prompt, one after the other.
        await gone(
            await Call.begin(rig, server, _named(number), 50_000, prompt="x" * 20_000, model="narrow"), "prefill"
        )

    async def gone_in_decode(number: int) -> None:
        await gone(await Call.begin(rig, server, _named(number), 50_000), "decode")

    async def deadline(number: int) -> None:
        call = await Call.begin(rig, server, kind(number), 50_000, find=False, timeout=0.5)
        assert (await call.finish()).error is not None

    async def each(act: Callable[[int], Awaitable[None]], count: int = COUNT) -> None:
        await parallel(count, act)

    async def blocked_queue() -> None:
        blocker = await Call.begin(rig, server, "sse-generate", 50_000, model="narrow")
        await rig.running(blocker.id)
        await each(gone_in_queue)
        await blocker.leave()

    async def one_by_one() -> None:
        for number in range(COUNT):
            await gone_in_prefill(number)

    async def worker_killed() -> None:
        calls = await _running(rig, server, COUNT)
        os.kill((await rig.views.workers())[0].pid, signal.SIGKILL)
        for call in calls:
            assert (await call.finish()).done, call.reply

    async def redis_stands_still() -> None:
        """At the time when the answers are done, and for clients that leave meanwhile."""
        calls, leaving = await _running(rig, server, COUNT), await _running(rig, server, COUNT, 50_000)
        rig.valkey.signal(signal.SIGSTOP)
        for call in leaving:
            await call.leave()
        page, sample = await asyncio.gather(browser.get(LIST), server.scrape())
        assert page.status_code == 503, "what is not known is not shown as nothing"
        assert sample.sum("sluice_redis_up") == 0
        assert not [name for name, _ in sample.series if name == "sluice_requests_inflight"]
        rig.valkey.signal(signal.SIGCONT)
        for call in calls:
            assert (await call.finish()).done, call.reply

    async def redis_empty() -> None:
        calls = await _running(rig, server, COUNT)
        await rig.valkey.kill()
        await rig.valkey.start()
        for call in calls:
            assert (await call.finish()).error is not None
        await eventually(lambda: _ready(server), 20, what="everybody has beaten again")

    classes: list[tuple[Callable[[], Awaitable[None]], dict[tuple[str, str], int]]] = [
        (lambda: each(finished), {("finished", "length"): COUNT}),
        (lambda: each(invalid), {}),
        (lambda: each(failed), {("failed", "engine_error"): COUNT}),
        (blocked_queue, {("cancelled", "client_gone"): COUNT + 1}),
        (one_by_one, {("cancelled", "client_gone"): COUNT}),
        (lambda: each(gone_in_decode), {("cancelled", "client_gone"): COUNT}),
        (lambda: each(deadline), {("cancelled", "deadline"): COUNT}),
        (worker_killed, {("finished", "length"): COUNT}),
        (redis_stands_still, {("finished", "length"): COUNT, ("cancelled", "client_gone"): COUNT}),
        (redis_empty, {("failed", "state_lost"): COUNT}),
    ]
    async with AsyncExitStack() as stack:
        browser = await operator(rig, server, stack)
        beside = await _running(rig, server, 3)
        await eventually(lambda: _agree(rig, server, browser, 3), 5, what="3 in flight, everywhere")
        for call in beside:
            await call.leave()
        expected["cancelled", "client_gone"] = 3
        for number, (act, ends) in enumerate(classes):
            await act()
            for outcome, count in ends.items():
                expected[outcome] = expected.get(outcome, 0) + count
            await rig.quiet(30)
            await eventually(
                lambda: _agree(rig, server, browser, 0), 10, what=f"nothing in flight after class {number}"
            )
            assert _outcomes(rig) == expected, f"after class {number}"
        assert "Clean: nothing is left behind." in (await browser.get(HEALTH)).text
        assert (await server.scrape()).sum("sluice_requests_total") == sum(expected.values())


def _named(number: int) -> str:
    """A transport whose id is known at once."""
    return ("sse-chat", "sse-generate", "ws", "sse-completions")[number % 4]


async def _running(rig: Rig, server: Server, count: int, tokens: int = 150) -> list[Call]:
    """Answers of so many tokens, all under way."""
    calls = [await Call.begin(rig, server, _named(n), tokens) for n in range(count)]
    for call in calls:
        call.reading()
    await asyncio.gather(*(rig.running(c.id, 3) for c in calls))
    return calls


async def _phase(rig: Rig, request_id: str, phase: str) -> bool:
    view = await rig.views.view(request_id)
    return view is not None and view.phase == phase


async def _agree(rig: Rig, server: Server, browser: httpx.AsyncClient, count: int) -> bool:
    return await everywhere(rig, server, browser) == {count}


async def _ready(server: Server) -> bool:
    return await server.get("/readyz") == 200


def _outcomes(rig: Rig) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for labels, value in rig.series("sluice_requests_total"):
        key = (labels["outcome"], labels["reason"])
        found[key] = found.get(key, 0) + value
    return found
