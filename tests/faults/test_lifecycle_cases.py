"""Faults that other servers of this kind had, one by one, under the names of the list they come from."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.harness import Rig, parallel
from tests.faults.transports import TRANSPORTS, Call
from tests.support import eventually

SCALE = float(os.environ.get("SLUICE_SCALE", "0.1"))
MakeRig = Callable[..., Any]


@pytest.mark.parametrize("others", [0, 8])
async def test_lc_01_close_at_any_moment(make_rig: MakeRig, others: int) -> None:
    """The abort is never lost, whichever step the close falls into."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=100,context=1000000,slots=32")
    _, server = await asyncio.gather(rig.pool(), rig.server())
    beside = [await Call.begin(rig, server, "sse-chat", 900_000) for _ in range(others)]
    for call in beside:
        call.reading()
    for delay in (0, 5, 20, 50, 100, 300, 1000, 3000):

        async def one(_: int, delay: int = delay) -> Call:
            call = await Call.begin(rig, server, "sse-chat", 900_000, find=delay >= 50)
            await asyncio.sleep(delay / 1000)
            await call.leave()
            return call

        calls = await parallel(max(2, int(50 * SCALE)), one)
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
    assert "unknown" not in server.process.log()


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
    for _ in range(max(5, int(20 * SCALE))):
        call = await Call.begin(rig, server, "json-chat", 50_000)
        await rig.running(call.id, 3)
        await call.leave()
        assert (await rig.ending(call.id, 2 + 3)).state == "cancelled"
    began = time.monotonic()
    assert (await (await Call.begin(rig, server, "sse-chat", 5)).finish()).done
    assert time.monotonic() - began < 3
    await rig.quiet()
    outcomes = await rig.views.outcomes()
    assert outcomes["finished:length"] == 1 and "failed:worker_lost" not in outcomes


async def test_lc_07_what_can_never_fit(make_rig: MakeRig) -> None:
    """Refused at once, and nothing behind it waits."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=200,context=256,slots=2")
    _, server = await asyncio.gather(rig.pool(), rig.server())
    for tokens, prompt in ((239, 16), (240, 16), (241, 16), (256, 16), (5, 255), (5, 256), (5, 2560), (1, 255)):
        body = {"model": "scripted", "prompt": "x" * prompt, "max_tokens": tokens, "ignore_eos": True}
        exchange = await server.post("/v1/completions", body)
        answer = await exchange.json()
        fits = tokens + prompt <= 256
        assert (exchange.status == 200) == fits, (tokens, prompt, exchange.status, answer)
        if not fits:
            assert exchange.status == 400 and answer["error"]["message"]
        await exchange.close()
        began = time.monotonic()
        assert (await (await Call.begin(rig, server, "sse-chat", 2, find=False)).finish()).done
        assert time.monotonic() - began < 3
    await rig.quiet()


async def test_lc_08_overflow_is_answered(make_rig: MakeRig) -> None:
    """One runs, one waits; every other call is told at once, with when to try again."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=50,slots=1,context=100000", SLUICE_MAX_QUEUED=1)
    _, server = await asyncio.gather(rig.pool(), rig.server())

    async def one(number: int) -> tuple[int, str]:
        kind = "sse-generate" if number % 2 else "json-chat"
        call = await Call.begin(rig, server, kind, 60, find=False)
        await call.finish(60)
        assert call.exchange is not None
        return call.status, call.exchange.headers.get("retry-after", "")

    answers = await parallel(60, one)
    admitted = [s for s, _ in answers if s == 200]
    refused = [(s, r) for s, r in answers if s != 200]
    assert 2 <= len(admitted) < 60
    assert all(s in (429, 503) and r for s, r in refused), refused
    await rig.quiet()
