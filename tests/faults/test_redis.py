"""Redis that drops connections, stands still, forgets everything, or is far away.

Guards: the settler's retries, the commander's ownership of its connection
(await a connection from a client's task and ``rf_01`` fails), the subscriber's
pings, the hub's bounded poll, the reaper's grace after an outage.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from inference.errors import StoreUnavailable
from tests.faults.harness import CHECK, SLACK, TTL, Exchange, Proxy, Rig
from tests.faults.transports import STREAMING, TRANSPORTS, Call, undisturbed
from tests.support import eventually

Timing = Callable[[str, float, float], None]
MakeRig = Callable[..., Any]
SCALE = float(os.environ.get("SLUICE_SCALE", "0.1"))


async def test_connections_killed_in_mid_stream(rig: Rig, timing: Timing) -> None:
    """CLIENT KILL of every connection, several times: all streams complete, nothing is lost or repeated."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    whole = await undisturbed(rig, server, 250, "cut")
    calls = [await Call.begin(rig, server, k, 250, prompt="cut") for k in ("sse-generate", "ws", "sse-completions")]
    for call in calls:
        call.reading()
    for kind in ("normal", "pubsub", "normal", "pubsub"):
        await asyncio.gather(*(rig.running(c.id) for c in calls))
        await rig.redis.call("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        seen = [len(c.reply.pieces) for c in calls]
        began = time.monotonic()
        await eventually(
            lambda seen=seen: all(len(c.reply.pieces) > n + 5 for c, n in zip(calls, seen, strict=True)), 15
        )
        timing(f"Redis connections killed ({kind}): streams go on", time.monotonic() - began, 1 + SLACK)
    for call in calls:
        reply = await call.finish()
        assert (reply.text, reply.done, reply.error) == (whole, True, None)
    await rig.quiet()


async def test_redis_paused_three_seconds(rig: Rig, timing: Timing) -> None:
    """Longer than every heartbeat's TTL: nobody is taken for dead when it goes on."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    whole = await undisturbed(rig, server, 400, "pause")
    calls = [await Call.begin(rig, server, k, 400, prompt="pause") for k in ("sse-generate", "ws")]
    for call in calls:
        call.reading()
        await rig.running(call.id, 10)
    rig.valkey.signal(signal.SIGSTOP)
    await asyncio.sleep(3)  # so long a pause is the case itself
    rig.valkey.signal(signal.SIGCONT)
    began = time.monotonic()
    seen = [len(c.reply.pieces) for c in calls]
    await eventually(lambda: all(len(c.reply.pieces) > n for c, n in zip(calls, seen, strict=True)), 15)
    timing("Redis paused for 3 s: streams go on after", time.monotonic() - began, 1 + SLACK)
    for call in calls:
        reply = await call.finish()
        assert (reply.text, reply.error) == (whole, None)
        assert (await rig.ending(call.id)).attempts == 1, "its worker was never taken for dead"
    await rig.quiet()


async def test_client_gone_while_redis_is_paused(rig: Rig, timing: Timing) -> None:
    """The settler holds the note until Redis answers."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    calls = [await Call.begin(rig, server, kind, 50_000) for kind in TRANSPORTS]
    for call in calls:
        await rig.running(call.id)
    rig.valkey.signal(signal.SIGSTOP)
    for call in calls:
        await call.leave()
    await asyncio.sleep(1)  # the pause goes on after they have gone
    rig.valkey.signal(signal.SIGCONT)
    timing("client gone while Redis is paused, after it goes on", await rig.quiet(15), 2 + SLACK)
    for call in calls:
        assert (await rig.ending(call.id)).reason == "client_gone"
        assert rig.aborts_of(call.id) == 1


@pytest.mark.parametrize("how", ["flushall", "restart"])
async def test_rf_06_state_lost_in_mid_stream(rig: Rig, how: str, timing: Timing) -> None:
    """Streams end with an error event, slots are freed, nothing is resurrected, new requests are served."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    calls = [await Call.begin(rig, server, kind, 50_000) for kind in TRANSPORTS]
    calls.append(await Call.begin(rig, server, "sse-generate", 50_000, resumable=True))
    for call in calls:
        call.reading()
        await rig.running(call.id, 3)
    began = time.monotonic()
    if how == "flushall":
        await rig.redis.call("FLUSHALL")
    else:
        await rig.valkey.kill()
        await rig.valkey.start()
    for call in calls:
        reply = await call.finish(30)
        assert reply.error is not None and not reply.done, (call.kind, reply)
    timing(f"Redis {'emptied' if how == 'flushall' else 'restarted empty'}: streams have ended",
           time.monotonic() - began, 2 + CHECK + SLACK)  # fmt: skip
    await eventually(lambda: _free(rig), 15, what="the worker has freed its slots")
    await rig.quiet()
    left = [k async for k in _keys(rig)]
    assert not [k for k in left if "req:" in k or "log:" in k], left
    await eventually(lambda: _ready(server), 10, what="everybody has beaten again")
    assert (await (await Call.begin(rig, server, "sse-chat", 5)).finish()).done
    await rig.quiet()


async def _free(rig: Rig) -> bool:
    workers = await rig.views.workers()
    return bool(workers) and all(w.held == 0 and w.stats.running == 0 for w in workers)


async def _keys(rig: Rig) -> Any:
    cursor = b"0"
    while True:
        cursor, page = await rig.redis.call("SCAN", cursor, "COUNT", 500)
        for key in page:
            yield key.decode()
        if not int(cursor):
            return


async def test_redis_away_for_good_ends_streams(make_rig: MakeRig, timing: Timing) -> None:
    """Past the outage limit a stream ends with an error event instead of waiting for ever."""
    rig = await make_rig(SLUICE_REDIS_OUTAGE_LIMIT=2, SLUICE_REDIS_TIMEOUT=1)
    _, server = await asyncio.gather(rig.pool(), rig.server())
    calls = [await Call.begin(rig, server, kind, 50_000) for kind in TRANSPORTS]
    for call in calls:
        call.reading()
        await rig.running(call.id, 3)
    began = time.monotonic()
    rig.valkey.signal(signal.SIGSTOP)
    for call in calls:
        reply = await call.finish(20)
        assert reply.error is not None and not reply.done
    timing("Redis away: streams end after the outage limit (2 s)", time.monotonic() - began, 2 + 2 + CHECK + SLACK)
    assert await server.get("/readyz") == 503
    exchange = await server.post("/v1/completions", {"model": "scripted", "prompt": "x", "max_tokens": 5})
    assert exchange.status == 503
    rig.valkey.signal(signal.SIGCONT)
    await rig.quiet(15)
    await eventually(lambda: _ready(server), 10)


async def _ready(server: Any) -> bool:
    return await server.get("/readyz") == 200


async def test_rf_01_cancelled_calls_never_mix_replies(make_rig: MakeRig, tmp_path: Any) -> None:
    """100 ms to Redis, streams cancelled at random; every other client checks that all it gets is its own."""
    rig = await make_rig()
    proxy = await Proxy(rig.valkey.port).start()
    try:
        _, server = await asyncio.gather(rig.pool(), rig.server(REDIS_URL=proxy.url))
        proxy.delay = 0.05  # each way
        chance = random.Random(1)
        gate = asyncio.Semaphore(16)
        wholes = [await undisturbed(rig, server, 30, f"owner {i}") for i in range(4)]

        async def one(number: int) -> None:
            async with gate:
                prompt = number % 4
                if number % 2:
                    kind = chance.choice(["sse-generate", "sse-chat", "json-chat", "ws"])
                    task = asyncio.create_task(
                        Call.begin(rig, server, kind, 2000, prompt=f"owner {prompt}", find=False)
                    )
                    await asyncio.sleep(chance.random() * 0.5)
                    call = await task
                    await call.leave()
                    return
                call = await Call.begin(rig, server, "sse-generate", 30, prompt=f"owner {prompt}", find=False)
                reply = await call.finish()
                assert (reply.text, reply.error) == (wholes[prompt], None)
                exchange = await Exchange.open(server.port, "GET", f"/v1/requests/{call.id}", key=server.key)
                assert exchange.status in (200, 404)
                if exchange.status == 200:
                    assert (await exchange.json())["id"] == call.id

        await asyncio.gather(*(one(i) for i in range(int(500 * SCALE))))
        await rig.quiet(20)
        clients = [c for c in (await rig.redis.call("CLIENT", "LIST")).decode().splitlines() if "sluice-s-" in c]
        assert len(clients) <= 2, "one connection for commands, one for messages"
        assert "Traceback" not in server.process.log()
    finally:
        await proxy.stop()


@pytest.mark.parametrize("how", ["drop", "kill-pubsub"])
async def test_rf_03_network_to_redis_is_gone_and_back(make_rig: MakeRig, how: str, timing: Timing) -> None:
    """No FIN and no RST, as with a pulled cable: readiness says so, and all works again soon after."""
    rig = await make_rig(SLUICE_REDIS_TIMEOUT=1)
    proxy = await Proxy(rig.valkey.port).start()
    try:
        pool, server = await asyncio.gather(rig.pool(REDIS_URL=proxy.url), rig.server(REDIS_URL=proxy.url))
        calls = [await Call.begin(rig, server, kind, 5000) for kind in STREAMING]
        for call in calls:
            call.reading()
            await rig.running(call.id, 3)
        if how == "drop":
            proxy.drop()
            await eventually(lambda: _unready(server), 10, what="readiness reflects the outage")
            outage = float(os.environ.get("SLUICE_OUTAGE", "5"))
            worked = _computed(server.process.pid), _computed(pool.pid)
            await asyncio.sleep(outage)
            for pid, before in zip((server.process.pid, pool.pid), worked, strict=True):
                assert _computed(pid) - before < 0.5 * outage, "nobody asks and asks again"
            proxy.restore()
        else:
            await rig.redis.call("CLIENT", "KILL", "TYPE", "pubsub")
        began = time.monotonic()
        await eventually(lambda: _ready(server), 10)
        cancelled, *others = calls
        exchange = await server.post(f"/v1/requests/{cancelled.id}/cancel", {})
        assert exchange.status == 200
        assert (await cancelled.finish(15)).error is not None
        assert (await (await Call.begin(rig, server, "sse-chat", 5)).finish(15)).done
        timing(f"network to Redis gone and back ({how}): cancel and dispatch work", time.monotonic() - began, 5 + SLACK)
        for call in others:  # survived, or ended with an error: never hung
            seen = len(call.reply.pieces)
            await eventually(lambda c=call, n=seen: c.reply.error or len(c.reply.pieces) > n, 10)
            await call.leave()
        await rig.quiet(15)
    finally:
        await proxy.stop()


def _computed(pid: int) -> float:
    """Processor time of a process and its children so far, s."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(p.cpu_times()[:2]) for p in family)


async def _unready(server: Any) -> bool:
    return await server.get("/readyz") == 503


async def test_late_commands_leave_nothing(make_rig: MakeRig) -> None:
    """A submit held back by the network arrives after its connection was given up and its settle is done."""
    rig = await make_rig(SLUICE_REDIS_TIMEOUT=1)
    proxy = await Proxy(rig.valkey.port).start()
    try:
        _, server = await asyncio.gather(rig.pool(), rig.server(REDIS_URL=proxy.url))
        proxy.drop()
        call = await Call.begin(rig, server, "sse-chat", 50_000, find=False)
        await asyncio.wait([call.reading()], timeout=10)
        assert call.reply.error is not None
        proxy.restore()
        await eventually(lambda: _ready(server), 10)
        await rig.quiet(15)
        assert (await (await Call.begin(rig, server, "sse-chat", 5)).finish(15)).done
    finally:
        await proxy.stop()


async def test_a_worker_that_has_loaded_while_redis_is_away_stays(make_rig: MakeRig) -> None:
    """It ended, and loaded again, for as long as Redis was away; after five times its pool called itself broken."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:load=3", SLUICE_REDIS_TIMEOUT=1)
    pool = rig.spawn("runworker")

    async def workers() -> list[tuple[str, str, int]]:
        try:
            return [(w.id, w.state, w.restarts) for w in await rig.views.workers()]
        except StoreUnavailable:
            return []

    ((worker, state, _),) = await eventually(workers, 40, what="the worker loads")
    assert state == "starting"
    await rig.valkey.kill()
    await eventually(lambda: "is ready on" in pool.log() or "ended with" in pool.log(), 30, what="it has loaded")
    await rig.valkey.start()

    async def serves() -> bool:
        return await workers() == [(worker, "ready", 0)]

    await eventually(serves, 30, what="the same worker serves")


@pytest.mark.parametrize("how", ["stands still", "is gone"])
@pytest.mark.parametrize("busy", [False, True])
async def test_a_pool_leaves_although_redis_does_not_answer(make_rig: MakeRig, how: str, busy: bool) -> None:
    """It asked twenty times more whether its workers could be buried, for more than two minutes."""
    rig = await make_rig(SLUICE_REDIS_TIMEOUT=1)
    pool = await rig.pool()
    if busy:
        server = await rig.server()
        call = await Call.begin(rig, server, "sse-chat", 50_000)
        call.reading()
        await rig.running(call.id)
    if how == "stands still":
        rig.valkey.signal(signal.SIGSTOP)
    else:
        await rig.valkey.kill()
    pool.signal(signal.SIGTERM)
    assert await pool.wait(14) == 0
    if how == "is gone":
        await rig.valkey.start()


async def test_rf_05_refused_sockets_leave_no_connections(make_rig: MakeRig) -> None:
    """Handshakes refused before accept, sockets that come and go, and refusals after it cost nothing that stays."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=50,slots=1,context=100000", SLUICE_MAX_QUEUED=1)
    _, server = await asyncio.gather(rig.pool(), rig.server(SLUICE_PRE_DRAIN=0, SLUICE_DRAIN_DEADLINE=90))
    runs = await Call.begin(rig, server, "ws", 50_000)
    runs.reading()
    await rig.running(runs.id)
    waits = await Call.begin(rig, server, "sse-chat", 5)
    count = int(5000 * SCALE)

    async def handshake(key: str, origin: str, wanted: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        lines = ["GET /ws/v1/stream HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade"]
        lines += ["Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==", "Sec-WebSocket-Version: 13", f"Origin: {origin}"]
        lines += [f"Authorization: Bearer {key}"] if key else []
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
        assert head.split()[1] in wanted.split(), head
        writer.transport.abort()

    async def ask_in_vain() -> None:
        call = await Call.begin(rig, server, "ws", 5, find=False)
        reply = await call.finish()
        assert reply.error is not None and reply.error["code"] == "overloaded"

    async def one(number: int) -> None:
        match number % 4:
            case 0:
                await handshake("", "http://evil.example", b"401 403")
            case 1:
                await handshake("wrong", "http://localhost", b"401 403")
            case 2:
                await handshake(server.key, "http://localhost", b"101")
            case _:
                await ask_in_vain()

    async def round_of(number: int, act: Callable[[int], Awaitable[None]]) -> None:
        gate = asyncio.Semaphore(32)

        async def limited(i: int) -> None:
            async with gate:
                await act(i)

        await asyncio.gather(*(limited(i) for i in range(number)))

    async def flat() -> None:
        await eventually(
            lambda: len(_files(server.process.pid)) <= before[1] + 3, 15, what=f"open files back to {before[1]}"
        )
        assert await _connections(rig) <= before[0] + 1
        assert psutil.Process(server.process.pid).memory_info().rss < before[2] + 16 * 2**20

    await round_of(100, one)
    await eventually(lambda: len(_files(server.process.pid)) < 60, 10)
    before = (
        await _connections(rig),
        len(_files(server.process.pid)),
        psutil.Process(server.process.pid).memory_info().rss,
    )
    await round_of(count, one)
    await flat()
    assert runs.reply.error is None, "nobody else noticed"
    server.process.signal(signal.SIGTERM)
    await eventually(lambda: "server is finishing" in server.process.log(), 10, what="it drains")
    await round_of(count, lambda _: handshake(server.key, "http://localhost", b"503"))
    await flat()
    await runs.leave()
    assert (await waits.finish()).done
    assert await server.process.wait() == 0


def _files(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")


async def _connections(rig: Rig) -> int:
    return len((await rig.redis.call("CLIENT", "LIST")).splitlines())


async def test_rf_06_record_outlives_every_ttl_while_alive(rig: Rig) -> None:
    """A stream longer than every TTL stays listed all the time and ends in the ordinary way."""
    _, server = await asyncio.gather(rig.pool(), rig.server())
    call = await Call.begin(rig, server, "sse-chat", int(50 * (TTL * 3)))
    reading = call.reading()
    await rig.running(call.id)
    seen = 0
    while not reading.done():
        view = await rig.views.view(call.id)
        if view is None:
            break
        assert not view.orphaned
        seen += 1
        await asyncio.wait([reading], timeout=0.2)
    reply = await call.finish()
    assert reply.done and seen > 10
    await rig.quiet()
