"""What operators tell single workers: quiet, resume, drain, restart. Real processes, as the admin's page tells them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from inference.messages import WorkerBeat, WorkerCommand, encode
from tests.faults.harness import SLACK, Rig, parallel
from tests.faults.transports import Call, undisturbed
from tests.support import eventually

MakeRig = Callable[..., Any]


async def tell(rig: Rig, worker: str, verb: Any) -> None:
    # Beside the worker itself the rig listens, which counts aborts.
    assert await rig.store.tell_worker(worker, encode(WorkerCommand(verb))) == 2


async def states(rig: Rig) -> dict[str, str]:
    return {w.id: w.state for w in await rig.views.workers()}


async def other_than(rig: Rig, worker: str) -> WorkerBeat:
    return next(w for w in await rig.views.workers() if w.id != worker)


async def test_quiet_takes_nothing_new_until_resumed(rig: Rig) -> None:
    """What it runs it finishes; all that comes meanwhile goes to the other one."""
    _, server = await asyncio.gather(rig.pool(2), rig.server())
    running = await Call.begin(rig, server, "sse-chat", 200)
    running.reading()
    quiet = (await rig.running(running.id, 10)).worker
    await tell(rig, quiet, "quiet")

    async def says(state: str) -> bool:
        return (await states(rig))[quiet] == state

    await eventually(lambda: says("quiet"), what="it says that it is quiet")

    async def one(_: int) -> str:
        call = await Call.begin(rig, server, "sse-generate", 10)
        assert (await call.finish()).done
        return (await rig.ending(call.id)).worker

    other = await other_than(rig, quiet)
    assert set(await parallel(12, one)) == {other.id}
    assert (await running.finish()).done
    ending = await rig.ending(running.id)
    assert (ending.worker, ending.attempts) == (quiet, 1)
    await tell(rig, quiet, "resume")
    await eventually(lambda: says("ready"), what="it says that it serves again")
    await tell(rig, other.id, "quiet")  # not before: for a moment nobody would serve
    await eventually(lambda: _is(rig, other.id, "quiet"), what="and the other one that it is quiet")
    assert set(await parallel(12, one)) == {quiet}


async def _is(rig: Rig, worker: str, state: str) -> bool:
    return (await states(rig))[worker] == state


async def test_restart_does_not_wait_for_what_runs(
    make_rig: MakeRig, timing: Callable[[str, float, float], None]
) -> None:
    """It waited for the drain timeout, half a minute: it was told to drain, and no more."""
    rig: Rig = await make_rig(SLUICE_DRAIN_TIMEOUT=600)
    pool, server = await asyncio.gather(rig.pool(2), rig.server())
    whole = await undisturbed(rig, server, 400, "again")
    call = await Call.begin(rig, server, "sse-generate", 400, prompt="again")
    reading = call.reading()
    old = (await rig.running(call.id, 10)).worker
    began = time.monotonic()
    await tell(rig, old, "restart")

    async def elsewhere() -> bool:
        view = await rig.views.view(call.id)
        return view is not None and view.state == "running" and view.worker != old

    await eventually(elsewhere, 10, what="its request runs elsewhere")
    timing("a worker is told to restart: its request runs elsewhere", time.monotonic() - began, 1 + SLACK)

    async def replaced() -> bool:
        now = await states(rig)
        return old not in now and list(now.values()) == ["ready", "ready"]

    await eventually(replaced, 30, what="another one serves in its place")
    assert (await asyncio.wait_for(reading, 60)).text == whole
    assert sum(w.restarts for w in await rig.views.workers()) == 1
    assert f"worker {old} on cpu ended as it was told" in pool.log() and "ERROR" not in pool.log()


async def test_a_drained_worker_is_not_replaced(rig: Rig) -> None:
    """It was, at once. What it runs it finishes; the last one gone, the server says that nobody serves."""
    pool, server = await asyncio.gather(rig.pool(2), rig.server())
    call = await Call.begin(rig, server, "sse-generate", 100)
    call.reading()
    first = (await rig.running(call.id, 10)).worker
    second = (await other_than(rig, first)).id
    await tell(rig, first, "drain")
    assert (await call.finish()).done
    ending = await rig.ending(call.id)
    assert (ending.worker, ending.attempts) == (first, 1)

    async def left(*workers: str) -> bool:
        (beat,) = await rig.views.pools()
        return beat.workers == list(workers) and not beat.starting and set(await states(rig)) == set(workers)

    await eventually(lambda: left(second), what="one is left, and none is coming")
    assert (await (await Call.begin(rig, server, "sse-generate", 5)).finish()).done
    await tell(rig, second, "drain")
    await eventually(left, what="none is left, and none is coming")
    (beat,) = await rig.views.pools()
    assert beat.retired == 2

    async def unserved() -> bool:
        exchange = await server.post("/v1/completions", {"model": "scripted", "prompt": "x", "max_tokens": 5})
        return exchange.status == 503

    await eventually(lambda: unserved(), 30, what="new requests are refused")
    assert await server.get("/readyz") == 503
    assert pool.alive(), "whoever supervises the pool would start it anew"
    assert "starting another" not in pool.log()
    pool.signal(15)
    assert await pool.wait() == 0
