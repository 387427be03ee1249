"""Faults that other servers of this kind had, one by one, under the names of the list they come from."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.harness import Rig, parallel
from tests.faults.transports import EVERY, STREAMING, TRANSPORTS, WHOLE, Call
from tests.support import eventually

SCALE = float(os.environ.get("SLUICE_SCALE", "0.1"))
MakeRig = Callable[..., Any]


@pytest.mark.parametrize("others", [0, 8])
async def test_lc_01_close_at_any_moment(make_rig: MakeRig, others: int) -> None:
    """The abort is never lost, whichever step the close falls into."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=100,context=1000000,slots=32")
    pool, server = await asyncio.gather(rig.pool(), rig.server())
    beside = [await Call.begin(rig, server, "sse-chat", 900_000) for _ in range(others)]
    for call in beside:
        call.reading()
    for delay in (0, 5, 20, 50, 100, 300, 1000, 3000):

        async def one(number: int, delay: int = delay) -> Call:
            call = await Call.begin(rig, server, STREAMING[number % len(STREAMING)], 900_000, find=delay >= 50)
            await asyncio.sleep(delay / 1000)
            await call.leave()
            return call

        calls = await parallel(max(len(STREAMING), int(50 * SCALE)), one)
        await eventually(lambda: _live(rig, others), 2 + 3, what=f"only the others are left (delay {delay} ms)")
        for call in calls:
            if call.id:
                assert rig.aborts_of(call.id) <= 1
    # What a worker says of itself is as old as its last heartbeat.
    await eventually(lambda: _held(rig, others), 2 + 3, what="the worker holds only the others")
    for call in beside:
        assert call.reply.error is None
        await call.leave()
    await rig.quiet()
    made = await _generated(rig)
    await rig.quiet()
    assert await _generated(rig) == made, "the worker decodes for nobody"
    assert not re.search("unknown|Traceback", server.process.log() + pool.log())


async def _generated(rig: Rig) -> int:
    return sum(w.stats.generated_tokens for w in await rig.views.workers())


async def test_lc_03_closes_and_cancels_around_the_last_token(make_rig: MakeRig) -> None:
    """Mass disconnects as answers end, cancelled twice besides, and cancels of what never was: nothing falls."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=100,context=100000,slots=64")
    pool, server = await asyncio.gather(rig.pool(), rig.server())
    (worker,) = await rig.views.workers()
    chance = random.Random(3)
    canary = await Call.begin(rig, server, "sse-chat", 800)
    watched = canary.reading()

    async def cancel(request_id: str) -> int:
        exchange = await server.post(f"/v1/requests/{request_id}/cancel", {})
        await exchange.close()
        return exchange.status

    async def one(number: int) -> list[int]:
        call = await Call.begin(rig, server, STREAMING[number % len(STREAMING)], 1 + number % 8)
        call.reading()
        await asyncio.sleep(chance.random() * 0.1)
        await call.leave()
        return [await cancel(call.id), await cancel(call.id), await cancel(f"gen-never{number}")]

    answers = await parallel(max(40, int(200 * SCALE)), one)
    assert {status for each in answers for status in each} <= {200, 404}
    assert {each[2] for each in answers} == {404}
    reply = await asyncio.wait_for(watched, 60)
    assert (reply.done, reply.finish) == (True, "length")
    await rig.quiet()
    assert (await rig.ending(canary.id)).generated_tokens == 800
    (now,) = await rig.views.workers()
    assert (now.id, now.pid, now.restarts) == (worker.id, worker.pid, 0)
    assert pool.alive() and server.process.alive()
    assert "Traceback" not in server.process.log() + pool.log()


async def _held(rig: Rig, count: int) -> bool:
    return sum(w.held for w in await rig.views.workers()) == count


async def _live(rig: Rig, count: int) -> bool:
    return await rig.views.count() == count


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_lc_04_close_before_the_first_token(rig: Rig, kind: str) -> None:
    """With the worker stopped nothing can come; the close is seen all the same."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    (worker,) = await rig.views.workers()
    os.kill(worker.pid, signal.SIGSTOP)
    waiting = await Call.begin(rig, server, kind, 50_000)
    await waiting.leave()
    at_once = await Call.begin(rig, server, kind, 50_000, find=False)
    await at_once.leave()
    await eventually(lambda: _live(rig, 0), 5, what="no record while the worker is stopped")
    os.kill(worker.pid, signal.SIGCONT)
    await rig.quiet(3 + 5)
    server.process.signal(signal.SIGTERM)
    await server.process.wait()
    assert "took too long" not in server.process.log()


async def test_lc_05_abandoned_plain_calls(make_rig: MakeRig) -> None:
    """Twenty impatient callers of the one slot: none leaves an orphan that the next has to wait for."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=50,slots=1,context=100000")
    _, server = await asyncio.gather(rig.pool(), rig.server())
    count = max(2 * len(WHOLE), int(20 * SCALE))
    for number in range(count):
        call = await Call.begin(rig, server, WHOLE[number % len(WHOLE)], 50_000)
        await rig.running(call.id, 3)
        await call.leave()
        assert (await rig.ending(call.id, 2 + 3)).reason == "client_gone"
        assert rig.aborts_of(call.id) == 1
    began = time.monotonic()
    assert (await (await Call.begin(rig, server, "sse-chat", 5)).finish()).done
    assert time.monotonic() - began < 3
    await rig.quiet()
    assert await rig.views.outcomes() == {"cancelled:client_gone": count, "finished:length": 1}


@pytest.mark.parametrize("bound", ["context=256", "context=4096,cache=256"])
async def test_lc_07_what_can_never_fit(make_rig: MakeRig, bound: str) -> None:
    """Refused at once, and nothing behind it waits; so is what the model could hold, and the cache could not."""
    rig = await make_rig(SLUICE_MODELS=f"scripted=scripted:rate=200,{bound},slots=2")
    _, server = await asyncio.gather(rig.pool(), rig.server())

    async def short() -> None:
        began = time.monotonic()
        assert (await (await Call.begin(rig, server, "sse-chat", 2, find=False)).finish()).done
        assert time.monotonic() - began < 3

    # By one token, by a page of sixteen, by all.
    sums = [(224, 16), (239, 16), (240, 16), (241, 16), (256, 16), (5, 255), (5, 256), (5, 2560), (1, 255)]
    for tokens, prompt in sums:
        body = {"model": "scripted", "prompt": "x" * prompt, "max_tokens": tokens, "ignore_eos": True}
        exchange = await server.post("/v1/completions", body)
        answer = await exchange.json()
        fits = tokens + prompt <= 256
        assert (exchange.status == 200) == fits, (tokens, prompt, exchange.status, answer)
        if not fits:
            assert exchange.status == 400 and answer["error"]["message"]
        await exchange.close()
        await short()
    for kind in EVERY:
        for tokens, prompt in ((256, 16), (5, 2560)):
            call = await Call.begin(rig, server, kind, tokens, prompt="x" * prompt, find=False)
            reply = await call.finish()
            assert reply.error is not None and not reply.pieces, (kind, reply)
            assert reply.error["code"] == "context_length_exceeded"
            assert kind == "ws" or call.status == 400
        await short()
    await rig.quiet()


async def test_lc_08_overflow_is_answered(make_rig: MakeRig) -> None:
    """One runs, one waits; every other call is told so while they do, with when to try again."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=50,slots=1,context=100000", SLUICE_MAX_QUEUED=1)
    _, server = await asyncio.gather(rig.pool(), rig.server())
    runs = await Call.begin(rig, server, "sse-chat", 50_000)
    runs.reading()
    await rig.running(runs.id)
    waits = await Call.begin(rig, server, "sse-generate", 5)
    waits.reading()

    async def one(number: int) -> None:
        kind = EVERY[number % len(EVERY)]
        call = await Call.begin(rig, server, kind, 60, find=False)
        reply = await call.finish(60)
        assert reply.error is not None and reply.error["code"] == "overloaded", (kind, reply)
        if call.exchange is not None:
            assert call.status == 429
            assert int(call.exchange.headers["retry-after"]) >= 1
            assert call.exchange.headers["content-type"].startswith("application/json"), "no stream was begun"

    await parallel(60, one)
    assert runs.reply.error is None and not runs.reply.done
    assert (await rig.views.queue_depth("scripted"), await rig.views.running("scripted")) == (1, 1)
    assert (await server.scrape()).sum("sluice_queue_depth") == 1
    await runs.leave()
    assert (await waits.finish()).done
    await rig.quiet()
