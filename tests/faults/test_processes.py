"""Processes that die, freeze and leave, for real; every test measures the time to clean.

Guards: supervisor's ``_bury`` and the reaper (take either away and a row hangs
past its bound), the fencing of ``append`` (thawed zombie), the count of
attempts in ``requeue`` (poison), the kernel's parent-death signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import REAP, SLACK, TTL, Rig, Server
from tests.faults.transports import TRANSPORTS, Call, undisturbed
from tests.support import eventually

Timing = Callable[[str, float, float], None]
MakeRig = Callable[..., Any]


async def _worker_of(rig: Rig, request_id: str) -> Any:
    view = await rig.running(request_id)
    return next(w for w in await rig.views.workers() if w.id == view.worker)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_worker_sigkill_continues_elsewhere(rig: Rig, kind: str, timing: Timing) -> None:
    """The stream goes on with the next token: the text is that of an undisturbed run."""
    _, _, server = await asyncio.gather(rig.pool(), rig.pool(), rig.server())
    whole = await undisturbed(rig, server, 150, "once upon")
    call = await Call.begin(rig, server, "sse-generate" if kind == "sse-chat" else kind, 150, prompt="once upon")
    reading = call.reading()
    await rig.running(call.id, 30)
    worker = await _worker_of(rig, call.id)
    began = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    await eventually(lambda: _elsewhere(rig, call.id, worker.id), 10, what="claimed by another worker")
    timing("worker SIGKILL: its request runs elsewhere", time.monotonic() - began, 1 + SLACK)
    reply = await asyncio.wait_for(reading, 30)
    assert (reply.done, reply.finish, reply.error) == (True, "length", None)
    if kind != "json-chat":
        assert reply.text == whole
    await rig.quiet()
    ending = await rig.ending(call.id)
    assert (ending.state, ending.attempts, ending.generated_tokens) == ("finished", 2, 150)


async def _elsewhere(rig: Rig, request_id: str, worker: str) -> bool:
    view = await rig.views.view(request_id)
    return view is not None and view.state == "running" and view.worker != worker


async def test_wf_01_only_worker_killed_with_running_and_queued(make_rig: MakeRig, timing: Timing) -> None:
    """Three run, three wait; all six finish on the worker that is started in place of the dead one."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=50,slots=3,context=100000")
    _, server = await asyncio.gather(rig.pool(), rig.server())
    whole = await undisturbed(rig, server, 80, "six")
    calls = [await Call.begin(rig, server, "sse-generate", 80, prompt="six") for _ in range(6)]
    for call in calls:
        call.reading()
    for call in calls[:3]:
        await rig.running(call.id, 10)
    worker = await _worker_of(rig, calls[0].id)
    began = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    unready = asyncio.create_task(eventually(lambda: _status(server, "/readyz", 503), 10, what="not ready"))
    late = [await Call.begin(rig, server, kind, 5, find=False) for kind in TRANSPORTS]
    await eventually(lambda: _respawned(rig, worker.id), 20, what="another worker serves")
    timing("worker SIGKILL: another one serves in its place", time.monotonic() - began, 5 + SLACK)
    await unready
    assert [(await c.finish()).text for c in calls] == [whole] * 6
    for call in late:  # waits its turn, or is told that nobody serves; it never hangs
        reply = await call.finish(30)
        assert reply.done or (reply.error or {}).get("code") == "model_unavailable", (call.kind, reply)
    await rig.quiet()
    (now,) = await rig.views.workers()
    assert now.restarts == 1
    await eventually(lambda: _status(server, "/readyz", 200))


async def _status(server: Any, path: str, want: int) -> bool:
    return await server.get(path) == want


async def _respawned(rig: Rig, dead: str) -> bool:
    workers = await rig.views.workers()
    return any(w.id != dead and w.state == "ready" for w in workers)


async def test_wf_03_engine_raises(rig: Rig, timing: Timing) -> None:
    """The engine's loop ends: the process exits, is replaced, and all requests are answered in full."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    calls = [await Call.begin(rig, server, "sse-generate", 60, prompt=f"calm {i}") for i in range(3)]
    bad = await Call.begin(rig, server, "sse-generate", 60, prompt="[[raise@20]]")
    for call in (*calls, bad):
        call.reading()
    worker = await _worker_of(rig, bad.id)
    await rig.running(bad.id, 15)
    began = time.monotonic()
    await eventually(lambda: _elsewhere(rig, bad.id, worker.id), 10)
    timing("worker raises in the engine: its request runs elsewhere", time.monotonic() - began, 5 + SLACK)
    for call in (*calls, bad, *[await Call.begin(rig, server, "sse-generate", 5) for _ in range(4)]):
        reply = await call.finish()
        assert reply.done and reply.error is None
    await rig.quiet()
    log = "".join(p.log() for p in rig._processes)
    assert bad.id in log and "engine has died" in log


async def test_worker_sigterm_hands_back(make_rig: MakeRig, timing: Timing) -> None:
    """A worker that leaves before its requests are done hands them to another at its drain deadline."""
    rig = await make_rig(SLUICE_DRAIN_TIMEOUT=0.5)
    _, _, server = await asyncio.gather(rig.pool(), rig.pool(), rig.server())
    whole = await undisturbed(rig, server, 200, "leave")
    call = await Call.begin(rig, server, "sse-generate", 200, prompt="leave")
    reading = call.reading()
    worker = await _worker_of(rig, call.id)
    await rig.running(call.id, 10)
    began = time.monotonic()
    os.kill(worker.pid, signal.SIGTERM)
    await eventually(lambda: _elsewhere(rig, call.id, worker.id), 10)
    timing("worker SIGTERM: handed back at the drain deadline (0.5 s)", time.monotonic() - began, 0.5 + 1 + SLACK)
    assert (await asyncio.wait_for(reading, 30)).text == whole
    await rig.quiet()
    assert (await rig.ending(call.id)).state == "finished"


async def test_dr_05_worker_sigterm_finishes_what_runs(rig: Rig) -> None:
    """Within the drain timeout a leaving worker finishes its requests; queued ones wait for the next."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    calls = [await Call.begin(rig, server, "sse-generate", 60, prompt=f"dr {i}") for i in range(12)]  # 8 slots
    for call in calls:
        call.reading()
    worker = await _worker_of(rig, calls[0].id)
    os.kill(worker.pid, signal.SIGTERM)
    for call in calls:
        reply = await call.finish()
        assert reply.done and reply.error is None
    await rig.quiet()
    first = await rig.ending(calls[0].id)
    assert (first.worker, first.attempts) == (worker.id, 1)


async def test_dr_05_everything_sigterm_without_grace(rig: Rig, timing: Timing) -> None:
    """Server and pool leave at once: every client hears an ending, no record stays."""
    pool, server = await asyncio.gather(
        rig.pool(SLUICE_DRAIN_TIMEOUT=0), rig.server(SLUICE_PRE_DRAIN=0, SLUICE_DRAIN_DEADLINE=0)
    )
    calls = [await Call.begin(rig, server, kind, 5000) for kind in TRANSPORTS for _ in range(3)]
    for call in calls:
        call.reading()
    await rig.running(calls[0].id)
    began = time.monotonic()
    server.process.signal(signal.SIGTERM)
    pool.signal(signal.SIGTERM)
    for call in calls:
        reply = await call.finish(15)
        assert reply.error is not None and not reply.done, (call.kind, reply)
    timing("everything SIGTERM, no grace: every client has an ending", time.monotonic() - began, 2 + SLACK)
    await server.process.wait()
    await pool.wait()
    assert await rig.views.count() == 0
    for call in calls:
        assert (await rig.ending(call.id)).reason == "shutdown"


async def test_worker_sigstop_is_killed_and_its_requests_go_on(rig: Rig, timing: Timing) -> None:
    _, _, server = await asyncio.gather(rig.pool(), rig.pool(), rig.server())
    whole = await undisturbed(rig, server, 150, "frozen")
    call = await Call.begin(rig, server, "sse-generate", 150, prompt="frozen")
    reading = call.reading()
    await rig.running(call.id, 20)
    worker = await _worker_of(rig, call.id)
    began = time.monotonic()
    os.kill(worker.pid, signal.SIGSTOP)
    await eventually(lambda: _elsewhere(rig, call.id, worker.id), TTL + 10)
    timing("worker SIGSTOP: its request runs elsewhere", time.monotonic() - began, TTL + 1 + SLACK)
    await eventually(lambda: not _exists(worker.pid), TTL + 5, what="the frozen worker is killed")
    assert (await asyncio.wait_for(reading, 30)).text == whole
    await rig.quiet()


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_thawed_zombie_changes_nothing(rig: Rig, timing: Timing) -> None:
    """Supervisor and worker freeze together, as a lost host does; the thawed worker's frames are refused."""
    lost = await rig.pool()
    server = await rig.server()
    whole = await undisturbed(rig, server, 300, "zombie")
    call = await Call.begin(rig, server, "sse-generate", 300, prompt="zombie")
    reading = call.reading()
    worker = await _worker_of(rig, call.id)
    await rig.running(call.id, 20)
    lost.signal(signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    await rig.pool()
    await eventually(lambda: _elsewhere(rig, call.id, worker.id), TTL + 10)
    timing("worker's host lost: its request runs elsewhere", time.monotonic() - began, TTL + REAP + 1 + SLACK)
    os.kill(worker.pid, signal.SIGCONT)
    reply = await asyncio.wait_for(reading, 30)
    assert reply.text == whole and reply.done
    await rig.quiet()
    ending = await rig.ending(call.id)
    assert (ending.generated_tokens, ending.attempts) == (300, 2)
    lost.signal(signal.SIGCONT)


async def test_wf_06_supervisor_sigkill(rig: Rig, timing: Timing) -> None:
    """Its workers die with it; their requests wait for another pool and finish there."""
    pool, server = await asyncio.gather(rig.pool(2), rig.server())
    pids = [w.pid for w in await rig.views.workers()]
    whole = await undisturbed(rig, server, 100, "orphan")
    calls = [await Call.begin(rig, server, "sse-generate", 100, prompt="orphan") for _ in range(4)]
    for call in calls:
        call.reading()
        await rig.running(call.id, 3)
    began = time.monotonic()
    pool.signal(signal.SIGKILL)
    await eventually(lambda: not any(map(_exists, pids)), 10, what="its workers are gone")
    timing("supervisor SIGKILL: its workers are gone", time.monotonic() - began, 5)
    await rig.pool(2)
    assert [(await c.finish()).text for c in calls] == [whole] * 4
    await rig.quiet()


async def test_poison_is_failed_not_retried_for_ever(rig: Rig, timing: Timing) -> None:
    """A request that kills every worker is given up after ``max_attempts``; one beside it survives."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    call = await Call.begin(rig, server, "sse-chat", 100, prompt="[[poison@5]]")
    began = time.monotonic()
    reply = await call.finish(40)
    timing("a request that kills its workers is given up", time.monotonic() - began, 10 + SLACK)
    assert reply.error is not None and not reply.done
    ending = await rig.ending(call.id)
    assert (ending.state, ending.reason, ending.attempts) == ("failed", "worker_lost", 2)
    await eventually(lambda: _status(server, "/readyz", 200), 20)
    assert (await (await Call.begin(rig, server, "sse-chat", 5)).finish()).done
    await rig.quiet()


async def test_engine_error_of_one_request(rig: Rig) -> None:
    """OC-02's kind: one fails in the engine, three healthy streams beside it complete."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    healthy = [await Call.begin(rig, server, "sse-chat", 60) for _ in range(3)]
    for call in healthy:
        call.reading()
    bad = await Call.begin(rig, server, "sse-chat", 60, prompt="[[error@5]]")
    reply = await bad.finish()
    assert reply.error is not None and not reply.done and reply.finish is None
    assert all([(await c.finish()).done for c in healthy])
    await rig.quiet()
    assert (await rig.ending(bad.id)).reason == "engine_error"
    assert rig.aborts_of(bad.id) == 0


#: Workers die as they start, of something that may pass. (What no other worker could do better ends the pool.)
DIES_EARLY = "import os, sys\nif 'inference.worker' in sys.orig_argv: os._exit(70)\n"


async def test_pool_that_cannot_start_its_workers(make_rig: MakeRig, tmp_path: Path) -> None:
    """A crash loop is slow, says so, and new requests are refused instead of waiting for ever."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(DIES_EARLY)
    rig = await make_rig(SLUICE_HEARTBEAT_TTL=TTL)
    server_task = asyncio.create_task(rig.server())
    good = await rig.pool()
    server = await server_task
    good.signal(signal.SIGTERM)
    await good.wait()
    rig.spawn("runworker", PYTHONPATH=f"{hook}:{rig.settings['PYTHONPATH']}")

    async def broken() -> bool:
        return any(p.broken for p in await rig.views.pools())

    await eventually(broken, 100, what="the pool calls itself broken")

    async def refused() -> bool:
        # One that came before the server had heard of it waits, but not for long.
        exchange = await server.post("/v1/completions", {"model": "scripted", "prompt": "x", "max_tokens": 5})
        return exchange.status == 503 and "retry-after" in exchange.headers

    await eventually(refused, 30, what="new requests are refused")
    assert await server.get("/readyz") == 503 and await server.get("/healthz") in (200, 404)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_pool_is_told_to_stop_while_its_worker_loads(make_rig: MakeRig, number: int) -> None:
    """Loading takes minutes and heeds no signal; the pool does not wait for it."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:load=600")
    pool = rig.spawn("runworker")

    async def loads() -> bool:
        return [w.state for w in await rig.views.workers()] == ["starting"]

    await eventually(loads, 40, what="the worker loads")
    (worker,) = await rig.views.workers()
    pool.signal(number)
    assert await pool.wait(20) == 0
    assert not _exists(worker.pid)
    assert await rig.views.pools() == [], "it has taken its heartbeat along"


async def test_server_sigkill_cancels_and_keeps_the_resumable(rig: Rig, timing: Timing) -> None:
    """Its plain requests are cancelled by a reaper elsewhere; a resumable one goes on for its client."""
    _, doomed, other = await asyncio.gather(rig.pool(), rig.server(), rig.server())
    whole = await undisturbed(rig, other, 400, "resume me")
    plain = [await Call.begin(rig, doomed, kind, 50_000) for kind in TRANSPORTS]
    kept = await Call.begin(rig, doomed, "sse-generate", 400, prompt="resume me", resumable=True)
    for call in (*plain, kept):
        call.reading()
    for call in (*plain, kept):
        await rig.running(call.id, 5)
    began = time.monotonic()
    doomed.process.signal(signal.SIGKILL)

    async def reaped() -> bool:
        views = (await rig.views.page(0, 100)).items
        return [v.id for v in views] == [kept.id]

    await eventually(reaped, TTL + 10, what="only the resumable one is left")
    timing("server SIGKILL: its plain requests are cancelled", time.monotonic() - began, TTL + REAP + 1 + SLACK)
    await eventually(lambda: _held(rig, 1), 5, what="their slots are free")
    assert all([(await rig.ending(c.id)).reason == "client_gone" for c in plain])
    assert all(rig.aborts_of(c.id) == 1 for c in plain)
    seen = kept.reply.text
    rig.uncounted.reread.add(kept.id)
    text, done = await _attach(other, kept.id, 0)
    assert done and text == whole and whole.startswith(seen)
    await rig.quiet()
    assert (await rig.ending(kept.id)).state == "finished"


async def _held(rig: Rig, count: int) -> bool:
    return sum(w.held for w in await rig.views.workers()) == count


async def _attach(server: Any, request_id: str, after: int) -> tuple[str, bool]:
    import json

    from tests.faults.harness import Exchange

    exchange = await Exchange.open(
        server.port, "GET", f"/v1/requests/{request_id}/events", key=server.key, headers={"Last-Event-ID": str(after)}
    )
    assert exchange.status == 200, await exchange.body()
    text, done = [], False
    async for data in exchange.events():
        if data == "[DONE]":
            done = True
        else:
            event = json.loads(data)
            text.append(event.get("text") or "")
    return "".join(text), done


async def test_resumable_of_a_killed_server_without_a_client_ends(make_rig: MakeRig, timing: Timing) -> None:
    """Nobody comes back: at the end of the grace time it is cancelled."""
    rig = await make_rig(SLUICE_RESUME_GRACE=1)
    _, doomed, _ = await asyncio.gather(rig.pool(), rig.server(), rig.server())
    call = await Call.begin(rig, doomed, "sse-generate", 50_000, resumable=True)
    await rig.running(call.id, 5)
    began = time.monotonic()
    doomed.process.signal(signal.SIGKILL)
    await rig.quiet(TTL + 12)
    timing("server SIGKILL, nobody re-attaches: end of the grace time (1 s)", time.monotonic() - began,
           TTL + REAP + 1 + 1 + SLACK)  # fmt: skip
    assert (await rig.ending(call.id)).reason == "client_gone"
    assert rig.aborts_of(call.id) == 1


async def test_server_sigterm_drains(rig: Rig, timing: Timing) -> None:
    """Short streams finish undisturbed; at the deadline long ones hear that the server ends."""
    _, server = await asyncio.gather(rig.pool(), rig.server(SLUICE_PRE_DRAIN=0, SLUICE_DRAIN_DEADLINE=2))
    short = [await Call.begin(rig, server, kind, 40) for kind in TRANSPORTS]
    long = [await Call.begin(rig, server, "sse-chat", 50_000), await Call.begin(rig, server, "ws", 50_000)]
    for call in (*short, *long):
        call.reading()
    for call in long:
        await rig.running(call.id, 3)
    began = time.monotonic()
    server.process.signal(signal.SIGTERM)
    for call in short:
        reply = await call.finish()
        assert reply.done and reply.error is None, (call.kind, reply)
    for call in long:
        reply = await call.finish(15)
        assert not reply.done and reply.error is not None, (call.kind, reply)
    assert await server.process.wait() == 0
    timing("server SIGTERM: it has drained (deadline 2 s) and left", time.monotonic() - began, 2 + 5 + SLACK)
    await rig.quiet()
    assert all([(await rig.ending(c.id)).reason == "shutdown" for c in long])
    assert not await rig.views.servers(), "it has taken its heartbeat along"


async def test_server_frozen_for_long_and_thawed(rig: Rig) -> None:
    """Its requests are reaped; when it wakes it does not bring one back."""
    _, frozen, _other = await asyncio.gather(rig.pool(), rig.server(), rig.server())
    call = await Call.begin(rig, frozen, "sse-chat", 50_000)
    call.reading()
    await rig.running(call.id, 5)
    frozen.process.signal(signal.SIGSTOP)
    assert (await rig.ending(call.id, TTL + 10)).reason == "client_gone"
    frozen.process.signal(signal.SIGCONT)
    reply = await call.finish(15)
    assert reply.error is not None and not reply.done
    await rig.quiet()
    assert (await (await Call.begin(rig, frozen, "sse-chat", 5)).finish()).done


async def test_deadlines_in_queue_and_decode(make_rig: MakeRig, timing: Timing) -> None:
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=50,slots=1,context=100000")
    _, server = await asyncio.gather(rig.pool(), rig.server())
    for kind in TRANSPORTS:
        running = await Call.begin(rig, server, kind, 50_000, timeout=1.5)
        running.reading()
        began = time.monotonic()
        await rig.running(running.id)
        queued = await Call.begin(rig, server, kind, 50_000, timeout=0.5)
        waiting = time.monotonic()
        reply = await queued.finish(10)
        timing("deadline passes in the queue", time.monotonic() - waiting - 0.5, REAP + 1 + SLACK)
        assert reply.error is not None and not reply.done
        reply = await running.finish(10)
        timing("deadline passes in decode", time.monotonic() - began - 1.5, REAP + 1 + SLACK)
        assert reply.error is not None and not reply.done
        for call in (queued, running):
            assert (await rig.ending(call.id)).reason == "deadline"
        await rig.quiet()
        assert (rig.aborts_of(running.id), rig.aborts_of(queued.id)) == (1, 0)


async def test_queue_timeout(make_rig: MakeRig) -> None:
    """The operator's limit on waiting ends a request that nobody claims, long before its own deadline."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=50,slots=1,context=100000", SLUICE_QUEUE_TIMEOUT=1)
    _, server = await asyncio.gather(rig.pool(), rig.server())
    running = await Call.begin(rig, server, "sse-chat", 150)
    running.reading()
    await rig.running(running.id)
    reply = await (await Call.begin(rig, server, "sse-chat", 5)).finish(10)
    assert reply.error is not None
    assert (await running.finish()).done, "once claimed, the limit no longer counts"
    await rig.quiet()


@pytest.mark.parametrize("kind", ["sse-chat", "sse-generate", "ws"])
async def test_client_that_stops_reading(make_rig: MakeRig, kind: str, timing: Timing) -> None:
    """It is cut off after ``send_timeout``; meanwhile memory stays bounded and others are served."""
    rig = await make_rig(
        SLUICE_MODELS="scripted=scripted:rate=0,context=10000000", SLUICE_SEND_TIMEOUT=2, SLUICE_WS_PING_INTERVAL=60
    )
    _, server = await asyncio.gather(rig.pool(), rig.server())
    call = await Call.begin(rig, server, kind, 3_000_000, receive_buffer=4096)
    if call.socket is not None:
        call.socket.transport.pause_reading()
    before = _rss(server.process.pid)
    began = time.monotonic()
    ending = await rig.ending(call.id, 40)
    timing("client stops reading: cut off (limit 2 s)", time.monotonic() - began, 2 + 6 + SLACK)
    assert ending.state == "cancelled"
    assert _rss(server.process.pid) - before < 100 * 2**20
    await rig.quiet()
    assert rig.aborts_of(call.id) == 1


def _rss(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_wf_07_workers_restart_in_a_loop(rig: Rig) -> None:
    """Three workers, one leaves every now and then: nobody times out, no text is repeated."""
    scale = float(os.environ.get("SLUICE_SCALE", "0.1"))
    pool, server = await asyncio.gather(rig.pool(3, SLUICE_DRAIN_TIMEOUT=0.3), rig.server())
    whole = await undisturbed(rig, server, 60, "loop")
    stop = asyncio.Event()

    async def restart() -> None:
        turn = 0
        while not stop.is_set():
            workers = sorted((w for w in await rig.views.workers() if w.state == "ready"), key=lambda w: w.started_ms)
            if len(workers) > 1:
                os.kill(workers[0].pid, signal.SIGTERM)
                turn += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 1.0)

    restarting = asyncio.create_task(restart())
    gate = asyncio.Semaphore(20)

    async def one() -> str:
        async with gate:
            reply = await (await Call.begin(rig, server, "sse-generate", 60, prompt="loop")).finish(60)
            assert reply.done and reply.error is None, reply
            return reply.text

    texts = await asyncio.gather(*(one() for _ in range(int(500 * scale))))
    stop.set()
    await restarting
    assert set(texts) == {whole}
    await rig.quiet()
    assert pool.alive()


async def test_wf_11_load_counts_do_not_leak(rig: Rig) -> None:
    """After many aborted streams and a restart, every counter is zero and load spreads evenly."""
    scale = float(os.environ.get("SLUICE_SCALE", "0.1"))
    _, server = await asyncio.gather(rig.pool(3), rig.server())
    gate = asyncio.Semaphore(16)

    async def aborted() -> None:
        async with gate:
            call = await Call.begin(rig, server, "sse-chat", 1000)
            await call.leave()

    await asyncio.gather(*(aborted() for _ in range(int(2000 * scale))))
    workers = await rig.views.workers()
    os.kill(workers[0].pid, signal.SIGKILL)
    await rig.quiet(20)
    await eventually(lambda: _all_ready(rig, 3), 15)
    steady = 600  # of 120, chance alone would put a share outside the bound now and then
    ids: list[str] = []
    gate = asyncio.Semaphore(12)

    async def answered() -> None:
        async with gate:
            call = await Call.begin(rig, server, "sse-chat", 25)
            ids.append(call.id)
            assert (await call.finish()).done

    await asyncio.gather(*(answered() for _ in range(steady)))
    await rig.quiet()
    share = Counter([(await rig.ending(i)).worker for i in ids])
    even = steady / 3
    assert all(abs(count - even) <= 0.2 * even for count in share.values()) and len(share) == 3, share
    status, printed = await rig.command("apikey", "create", "one", "--concurrent-requests", "1", "--quiet")
    assert status == 0, printed
    one = Server(server.process, server.port, next(w for w in printed.split() if w.startswith("sk-")))
    for _ in range(10):
        await eventually(lambda: _accepted_and_left(one), 5, every=0.2, what="the key's next request is accepted")
    await rig.quiet()
    assert await rig.redis.call("SCARD", rig.store.keys.running("scripted")) == 0


async def _accepted_and_left(server: Server) -> bool:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1000, "stream": True}
    exchange = await server.post("/v1/chat/completions", body)
    exchange.abort()
    assert exchange.status in (200, 429)
    return exchange.status == 200


async def _all_ready(rig: Rig, count: int) -> bool:
    return sum(w.state == "ready" for w in await rig.views.workers()) == count
