"""The drain of the whole product: real API, real worker, clients on SSE, JSON and WebSocket."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.faults.harness import Exchange, Rig, Server
from tests.faults.transports import EVERY, TRANSPORTS, Call
from tests.support import eventually

pytestmark = [pytest.mark.timeout(110), pytest.mark.faults]
RATE = 50


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path, SLUICE_MODELS=f"scripted=scripted:rate={RATE},context=100000,slots=24") as rig:
        yield rig


async def probe(server: Server, since: float) -> tuple[float, int]:
    """Seconds until readiness was false, and what liveness said then."""

    async def refused() -> bool:
        return await server.get("/readyz") == 503

    await eventually(refused, every=0.01)
    return time.monotonic() - since, await server.get("/livez")


async def test_dr_02_the_drain_does_not_slow_what_runs(rig: Rig) -> None:
    """DR-02: the signal must not stop the loop that brings the tokens."""
    await rig.pool()
    server = await rig.server(SLUICE_PRE_DRAIN="0", SLUICE_DRAIN_DEADLINE="30")
    kinds = ["sse-chat", "sse-generate", "sse-completions", "ws"]
    calls = [await Call.begin(rig, server, kind, RATE * 6) for kind in kinds]
    watching = [call.reading() for call in calls]
    for call in calls:
        await call.pieces(RATE * 2)

    sent = time.monotonic()
    server.process.signal(signal.SIGTERM)

    async def refusal() -> Exchange | None:
        reply = await server.post("/v1/chat/completions", {"model": "scripted", "messages": []})
        return reply if reply.status == 503 else None

    refused = await eventually(refusal)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    assert (await refused.json())["error"]["code"] == "shutting_down"
    unready, alive = await probe(server, sent)
    assert unready < 1.0
    assert alive == 200

    times = [reply.times for reply in await asyncio.gather(*watching)]
    ended = max(t[-1] for t in times)
    assert await server.process.wait() == 0
    assert time.monotonic() - ended < 2.0
    for call, came in zip(calls, times, strict=True):
        assert call.reply.done, call.reply.error
        assert len(call.reply.text) > 0
        gaps = [(a, b - a) for a, b in itertools.pairwise(came)]
        before = statistics.median(gap for at, gap in gaps if at < sent)
        after = statistics.median(gap for at, gap in gaps if at >= sent)
        assert after < before * 1.5 + 0.005, call.kind
        # Nor did they stand still once: the longest gap is far from the seconds that the drain takes.
        assert max(gap for at, gap in gaps if at >= sent) < 1.0, call.kind
    await rig.quiet()


async def test_dr_03_the_short_finish_and_the_long_are_told(rig: Rig) -> None:
    """DR-03: within the deadline streams end by themselves; at the deadline the rest hear of it, in band."""
    deadline = 4.0
    await rig.pool()
    server = await rig.server(SLUICE_PRE_DRAIN="0.2", SLUICE_DRAIN_DEADLINE=str(deadline))
    short = [await Call.begin(rig, server, kind, RATE * 2) for kind in EVERY]
    long = [await Call.begin(rig, server, kind, RATE * 30) for kind in EVERY]
    reading = [call.reading() for call in (*short, *long)]
    for call in (*short, *long):
        await rig.running(call.id)

    sent = time.monotonic()
    server.process.signal(signal.SIGTERM)
    assert await server.process.wait(0.2 + deadline + 5 + 2) == 0
    took = time.monotonic() - sent
    assert took < 0.2 + deadline + 5
    assert took > deadline  # it has waited for the long ones
    await asyncio.wait(reading, timeout=5)
    for call in short:
        assert call.reply.done, (call.kind, call.reply.error)
    for call in long:
        assert not call.reply.done
        assert call.reply.error is not None, call.kind
        # A socket is told by its last message or by the close code, a stream by its last event.
        # A response that was begun ends in the words that its clients know.
        told = {"ws": "1012", "sse-responses": "server_error"}.get(call.kind, "shutting_down")
        assert call.reply.error["code"] in (told, "shutting_down"), call.kind
        ending = await rig.ending(call.id)
        assert (ending.state, ending.reason) == ("cancelled", "shutdown"), call.kind
    await rig.quiet()
    assert rig.counted("sluice_requests_total", outcome="cancelled", reason="shutdown") == len(long)


async def test_dr_05_the_whole_deployment_without_grace(rig: Rig) -> None:
    """DR-05, the half of the server: everything is told to stop at once, and every client has an ending."""
    pool = await rig.pool(SLUICE_DRAIN_TIMEOUT="0")
    server = await rig.server(SLUICE_PRE_DRAIN="0", SLUICE_DRAIN_DEADLINE="0")
    # Twice as many as there are slots: half of them wait.
    calls = [await Call.begin(rig, server, kind, RATE * 30, find=False) for kind in [*EVERY, *TRANSPORTS[:3]] * 4]
    reading = [call.reading() for call in calls]

    async def taken() -> bool:
        return await rig.views.count() == len(calls)

    await eventually(taken, what="all are stored")
    for process in (pool, server.process):
        process.signal(signal.SIGTERM)
    _, open_ = await asyncio.wait(reading, timeout=2 + 3)
    assert not open_
    for call in calls:
        assert call.reply.error is not None, call.kind
        assert not call.reply.done
    assert await server.process.wait() == 0
    assert await rig.views.count() == 0


async def test_the_drain_log_names_what_is_open(rig: Rig) -> None:
    """The lines that docs/operations.md shows: seconds left, exchanges by route, requests by state, workers, ids."""
    await rig.pool()
    server = await rig.server(SLUICE_PRE_DRAIN="0.2", SLUICE_DRAIN_DEADLINE="1.5")
    call = await Call.begin(rig, server, "sse-chat", RATE * 30)
    await rig.running(call.id)
    reading = call.reading()
    server.process.signal(signal.SIGTERM)
    assert await server.process.wait() == 0
    await reading
    states = re.findall(r"server is (\w+)", server.process.log())
    assert states == ["pausing", "refusing", "finishing", "ending"]
    line = next(x for x in server.process.log().splitlines() if "draining (finishing)" in x)
    assert re.search(r"\d+ s left", line)
    assert "sse /v1/chat/completions=1" in line
    assert "running" in line
    assert call.id in line
    assert re.search(r"drained in \d", server.process.log())
