"""Lost replies, late commands and dead tasks, forced at the one call where they matter.

Each test says what happened before the code it guards was there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio as redis_async
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from inference.embedded import EmbeddedValkey
from inference.errors import StoreUnavailable
from inference.gateway import Detached, RequestEnded
from inference.gateway.settler import Settler
from inference.gateway.stream import RequestStream
from inference.lifecycle import Outcome, Reason
from inference.messages import Frame, encode
from inference.redisio import Commander, connect
from inference.redisio.commander import _is_outage
from tests.core.conftest import Deploy, read, spec
from tests.support import eventually


async def test_a_claim_whose_reply_is_lost(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search for strays the request named a living worker that knew nothing of it, until its deadline."""
    deployment = deploy()
    gateway, worker = await deployment.both()
    claim = worker.store.claim
    lost = 0

    async def lossy(*args: Any) -> Any:
        nonlocal lost
        claims = await claim(*args)
        if claims and not lost:
            lost += 1
            raise StoreUnavailable("the reply was lost")
        return claims

    monkeypatch.setattr(worker.store, "claim", lossy)
    async with gateway.request(spec(6)) as stream:
        frames = await asyncio.wait_for(read(stream), 10)
    assert lost == 1 and sum(len(f.ids) for f in frames) == 6
    await deployment.clean(gateway, strays=1)
    assert deployment.endings[0].attempts == 2


async def test_a_submit_that_arrives_after_its_settle(deploy: Deploy) -> None:
    """Without the search for strays the record stayed until its deadline, and a worker generated for nobody."""
    deployment = deploy()
    gateway, _ = await deployment.both()
    late = spec(4000)
    assert await gateway.store.settle(late.job.id, Outcome.cancelled(Reason.CLIENT_GONE)) is None
    await gateway.store.submit(late, server=gateway.id, slots=8)
    await eventually(lambda: gateway.views.view(late.job.id), what="it is there")
    await deployment.clean(gateway, strays=1)
    assert [e.reason for e in deployment.endings] == ["client_gone"]


async def test_settling_goes_on_until_redis_answers(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the settler's retries the record stayed."""
    deployment = deploy()
    gateway, _ = await deployment.both()
    settle = gateway.store.settle
    failures = 3

    async def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise StoreUnavailable("not now")
        return await settle(*args, **kwargs)

    monkeypatch.setattr(gateway.settler._store, "settle", failing)
    async with gateway.request(spec(4)) as stream:
        await read(stream)
    await gateway.settler.wait_empty()
    assert gateway.settler.retries == 3 and len(deployment.endings) == 1
    await deployment.clean(gateway)


async def test_a_reader_that_leaves_while_the_one_before_is_let_go_of_is_told_too() -> None:
    """Its note was deleted with the answer to the one before; the request kept a reader that nobody was."""
    asked: list[str | None] = []
    under_way, answer = asyncio.Event(), asyncio.Event()

    class Store:
        async def detach(self, request_id: str, *, server: str, grace: float, reader: str | None) -> tuple[str, str]:
            asked.append(reader)
            under_way.set()
            await answer.wait()
            return ("gone" if reader == "first" else "detached"), ""

    settler = Settler(Store(), "s", lambda ending: None)  # type: ignore[arg-type]
    settler.start()
    settler.put("r", Outcome.cancelled(Reason.CLIENT_GONE), grace=5.0, reader="first")
    await asyncio.wait_for(under_way.wait(), 5)
    done = settler.put("r", Outcome.cancelled(Reason.CLIENT_GONE), grace=5.0, reader="second")
    answer.set()
    await asyncio.wait_for(done, 5)
    assert asked == ["first", "second"]
    assert await settler.stop(1.0) == 0


async def test_settling_outlives_a_task_that_is_cancelled_again_and_again(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleanup awaited in the client's own task was cut short by its second cancellation."""
    deployment = deploy()
    gateway, _ = await deployment.both()
    settle = gateway.store.settle
    entered, go = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        await go.wait()
        return await settle(*args, **kwargs)

    monkeypatch.setattr(gateway.store, "settle", slow)

    async def serve() -> None:
        async with gateway.request(spec(4000)) as stream:
            while True:
                await stream.next()

    task = asyncio.create_task(serve())
    await eventually(lambda: gateway.open_ids() and gateway.streams()[0].received > 1)
    for _ in range(5):
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
    await asyncio.wait_for(entered.wait(), 5)
    go.set()
    await deployment.clean(gateway)
    assert [e.reason for e in deployment.endings] == ["client_gone"]


async def test_a_log_that_cannot_be_read_is_read_again(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single failed read used to end the stream, although the outage was over at once."""
    deployment = deploy(models="scripted=scripted:rate=100")
    gateway, _ = await deployment.both()
    async with gateway.request(spec(60)) as stream:
        await stream.next()
        original, failures = stream._read_log, 2

        async def failing(*args: Any) -> Any:
            nonlocal failures
            if failures:
                failures -= 1
                raise StoreUnavailable("gone for a moment")
            return await original(*args)

        monkeypatch.setattr(stream, "_read_log", failing)
        stream.resync()
        frames = await read(stream)
    assert failures == 0 and frames[-1].seq == 60
    assert [f.seq for f in frames] == list(range(frames[0].seq, 61))
    await deployment.clean(gateway)


async def test_the_fast_path_overtakes_a_read_of_the_log() -> None:
    """Frames that came both ways were delivered twice."""
    frames = [encode(Frame(n, [n], f"t{n}")) for n in range(1, 5)]
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(request_id: str, after: int, limit: int) -> list[bytes]:
        asked.set()
        await go.wait()
        return frames[after:3]

    stream = RequestStream("r", None, read_log=slow, buffer=16, attached=True)
    reading = asyncio.create_task(stream.next())
    await asked.wait()
    stream.feed(1, frames[0])
    stream.feed(1, frames[1])
    go.set()
    seen = [f.seq for f in await reading]
    stream.feed(1, frames[3])
    seen += [f.seq for f in await stream.next()]
    assert seen == [1, 2, 3, 4]


async def test_messages_lost_all_along(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hub's bounded poll a stream whose messages are lost hangs for ever."""
    deployment = deploy(models="scripted=scripted:rate=200")
    gateway, _ = await deployment.both()
    monkeypatch.setattr(gateway._hub._subscriber, "_on_message", lambda channel, data: None)
    async with gateway.request(spec(50)) as stream:
        frames = await asyncio.wait_for(read(stream), 20)
    assert sum(len(f.ids) for f in frames) == 50
    assert await gateway.cancel("r-unknown", Reason.ADMIN) is None
    with pytest.raises(RequestEnded) as caught:
        async with gateway.request(spec(4000)) as stream:
            await stream.next()
            await gateway.cancel(stream.id, Reason.ADMIN)
            while True:
                await asyncio.wait_for(stream.next(), 20)
    assert caught.value.outcome.reason is Reason.ADMIN, "what the lost message said is in the history"
    await deployment.clean(gateway)


async def test_the_older_reader_of_the_same_server_is_told_without_a_message(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The periodic check does not tell one reader from another of the same server: before, both read on."""
    deployment = deploy(models="scripted=scripted:rate=100")
    gateway, _ = await deployment.both()
    wanted = spec(200, resumable=True)
    async with gateway.request(wanted) as older:
        await older.next()
        monkeypatch.setattr(gateway._hub._subscriber, "_on_message", lambda channel, data: None)
        async with gateway.attach(wanted.job.id, owner="key:test") as newer:
            with pytest.raises(Detached) as caught:
                await asyncio.wait_for(read(older), 1)
            assert caught.value.superseded
            assert sum(len(f.ids) for f in await read(newer)) == 200
    await deployment.clean(gateway)


@pytest.mark.parametrize("prefill", [0, 100_000])
async def test_aborts_lost(deploy: Deploy, monkeypatch: pytest.MonkeyPatch, prefill: int) -> None:
    """Without the worker's periodic check it computes to the end for nobody.

    In decode the refusal of its next frame tells it as well; in prefill nothing else does.
    """
    deployment = deploy(models=f"scripted=scripted:rate=200,context=1000000,prefill={prefill}")
    gateway, worker = await deployment.both()
    monkeypatch.setattr(worker._subscriber, "_on_message", lambda channel, data: None)
    async with gateway.request(spec(900_000)):
        await eventually(lambda: worker.beat().held == 1, what="claimed")
    await deployment.clean(gateway)


async def test_a_worker_that_claims_again_what_it_still_holds(deploy: Deploy) -> None:
    """Cut off and taken for dead, it is the next to claim. Before, both attempts ran until the second was prefilled."""
    deployment = deploy(models="scripted=scripted:rate=100,prefill=20", check_interval=20.0)
    gateway, worker = await deployment.both()
    async with gateway.request(spec(400)) as stream:
        undisturbed = await read(stream)
    async with gateway.request(spec(400)) as stream:
        frames = await stream.next()
        assert await gateway.store.requeue(stream.id, worker=worker.id, lost=True, certain=False) == "requeued"
        frames += await asyncio.wait_for(read(stream), 20)
    assert [i for f in frames for i in f.ids] == [i for f in undisturbed for i in f.ids]
    await deployment.clean(gateway)
    assert deployment.endings[-1].attempts == 2


async def test_what_is_refused_of_an_attempt_does_not_end_the_next_one(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of a late frame had the worker drop what it had claimed anew, and look for it two checks later."""
    deployment = deploy(models="scripted=scripted:rate=100", check_interval=20.0)
    gateway, worker = await deployment.both()
    append, late, claimed = worker.store.append, asyncio.Event(), asyncio.Event()

    async def delayed(*args: Any) -> Any:
        if not late.is_set():
            late.set()
            await claimed.wait()
        return await append(*args)

    async with gateway.request(spec(60)) as stream:
        frames = await stream.next()
        monkeypatch.setattr(worker.store, "append", delayed)
        await late.wait()
        assert await gateway.store.requeue(stream.id, worker=worker.id, lost=True, certain=False) == "requeued"
        await eventually(lambda: stream.attempt == 2, what="claimed again")
        claimed.set()
        frames += await asyncio.wait_for(read(stream), 15)
    assert sum(len(f.ids) for f in frames) == 60
    await deployment.clean(gateway)


async def test_an_outbox_that_fails_ends_the_worker(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose frames go nowhere used to live on, and its streams hung."""
    deployment = deploy()
    gateway, worker = await deployment.both()

    async def broken(*args: Any) -> Any:
        raise RuntimeError("no frame leaves")

    monkeypatch.setattr(worker.store, "append", broken)
    async with gateway.request(spec(20, timeout=2)) as stream:
        await eventually(lambda: worker.fatal)  # type: ignore[attr-defined]
        await eventually(lambda: gateway.views.view(stream.id))
    monkeypatch.undo()
    await gateway.settler.wait_empty()


async def test_a_full_redis_is_an_outage(deploy: Deploy, redis: redis_async.Redis) -> None:
    """Out of memory refuses writes: they are repeated when it passes, and nothing dies of it."""
    deployment = deploy(models="scripted=scripted:rate=100")
    gateway, worker = await deployment.both()
    async with gateway.request(spec(100)) as stream:
        await stream.next()
        await redis.config_set("maxmemory", "1")
        try:
            await eventually(lambda: worker.redis.errors, what="writes are refused")
        finally:
            await redis.config_set("maxmemory", "0")
        frames = await asyncio.wait_for(read(stream), 20)
    assert frames[-1].seq == 100 and not worker.fatal  # type: ignore[attr-defined]
    await deployment.clean(gateway)


#: How a Redis comes to take no writes, and how it takes them again.
REFUSALS = {
    "a replica": (["REPLICAOF", "127.0.0.1", "1"], ["REPLICAOF", "NO", "ONE"]),
    "too few replicas": (
        ["CONFIG", "SET", "min-replicas-to-write", "1"],
        ["CONFIG", "SET", "min-replicas-to-write", "0"],
    ),
}


@pytest.mark.parametrize("how", REFUSALS)
async def test_a_redis_that_takes_no_writes_for_a_while_is_an_outage(
    deploy: Deploy, redis: redis_async.Redis, how: str
) -> None:
    """As in a failover. A replica's refusal was an answer: workers died of it, and what ended was not settled."""
    deployment = deploy(models="scripted=scripted:rate=100", heartbeat_ttl=10.0)
    gateway, worker = await deployment.both()
    refuse, allow = REFUSALS[how]
    async with gateway.request(spec(100)) as stream:
        async with gateway.request(spec(4000)) as leaves:
            await leaves.next()
            await stream.next()
            await redis.execute_command(*refuse)
        try:
            await eventually(lambda: worker.redis.errors and gateway.settler.retries, what="writes are refused")
        finally:
            await redis.execute_command(*allow)
        frames = await asyncio.wait_for(read(stream), 20)
    assert frames[-1].seq == 100 and not worker.fatal  # type: ignore[attr-defined]
    await deployment.clean(gateway)
    assert sorted(e.reason for e in deployment.endings) == ["client_gone", "length"]


async def test_a_redis_that_takes_no_writes_for_good_ends_streams(deploy: Deploy, redis: redis_async.Redis) -> None:
    """Reads are answered all the while. Before, each of them ended the outage, and the limit was never reached."""
    deployment = deploy(models="scripted=scripted:rate=100", heartbeat_ttl=10.0, redis_outage_limit=1.0)
    gateway, _ = await deployment.both()
    try:
        with pytest.raises(RequestEnded, match="does not answer"):
            async with gateway.request(spec(4000)) as stream:
                await stream.next()
                await redis.execute_command(*REFUSALS["a replica"][0])
                await eventually(lambda: gateway.redis.errors, what="writes are refused")
                assert await gateway.views.count() == 1 and not gateway.healthy
                await asyncio.wait_for(read(stream), 20)
    finally:
        await redis.execute_command(*REFUSALS["a replica"][1])
    await deployment.clean(gateway)
    assert [e.reason for e in deployment.endings] == ["state_lost"]
    await eventually(lambda: gateway.healthy, what="heartbeats are taken")


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("READONLY You can't write against a read only replica.", True),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", True),
        ("CLUSTERDOWN The cluster is down", True),
        ("TRYAGAIN Multiple keys request during rehashing of slot", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("MISCONF Redis is configured to save RDB snapshots, but it is currently unable to persist to disk.", True),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", True),
        ("OOM command not allowed when used memory > 'maxmemory'.", True),
        ("ERR Error running script (call to f_1): @user_script:3: -READONLY You can't write against a read", True),
        ("ERR Error running script (call to f_1): @user_script:3: -OOM command not allowed when used", True),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("NOPERM this user has no permissions to run the 'keys' command", False),
        ("CROSSSLOT Keys in request don't hash to the same slot", False),
        ("ERR unknown command 'OOMPH'", False),
    ],
)
def test_what_passes_is_an_outage_and_what_does_not_is_an_answer(text: str, passes: bool) -> None:
    """As the library gives it: of some it takes away the code, and tells it by the class."""
    error = BaseParser.parse_error(text)
    assert isinstance(error, ResponseError)
    assert _is_outage(error) == passes


async def test_lc_10_no_task_is_left(deploy: Deploy) -> None:
    """32 streams of mixed lengths at once: no text crosses over, and no task stays."""
    deployment = deploy(models="scripted=scripted:rate=0")
    gateway, _ = await deployment.both()
    lengths = [1 + (i * 37) % 300 for i in range(32)]
    before = {t.get_name() for t in asyncio.all_tasks()}

    async def one(number: int) -> list[int]:
        async with gateway.request(spec(lengths[number], prompt=f"prompt {number}")) as stream:
            return [i for f in await read(stream) for i in f.ids]

    alone = [await one(n) for n in range(32)]
    together = await asyncio.gather(*(one(n) for n in range(32)))
    assert together == alone and [len(ids) for ids in together] == lengths
    await deployment.clean(gateway)
    await eventually(lambda: {t.get_name() for t in asyncio.all_tasks()} <= before, what="no task is left")


async def test_lc_03_cancels_around_the_last_token(deploy: Deploy) -> None:
    """Mass disconnects and doubled cancels as answers end; a canary beside them gets every token."""
    deployment = deploy(models="scripted=scripted:rate=0,slots=64")
    gateway, _ = await deployment.both()

    async def canary() -> int:
        async with gateway.request(spec(3000)) as stream:
            return sum(len(f.ids) for f in await read(stream))

    watched = asyncio.create_task(canary())

    async def one(number: int) -> None:
        submission = spec(1 + number % 8)

        async def serve() -> None:
            async with gateway.request(submission) as stream:
                await read(stream)

        task = asyncio.create_task(serve())
        for _ in range(number % 13):
            await asyncio.sleep(0)
        if number % 3:
            task.cancel()
        await asyncio.gather(task, gateway.cancel(submission.job.id, Reason.USER), return_exceptions=True)
        await gateway.cancel(submission.job.id, Reason.USER)
        await gateway.cancel("never-was", Reason.USER)

    await asyncio.gather(*(one(n) for n in range(200)))
    assert await watched == 3000
    await deployment.clean(gateway)
    ids = [e.id for e in deployment.endings]
    assert len(ids) == len(set(ids))


async def test_a_cancellation_that_the_library_makes_an_error_of_ends_the_connection(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does where one comes as it connects; the task then waited for its next command, and its loop for the task."""
    entered = asyncio.Event()

    async def connecting(self: Commander, batch: Any) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise redis_async.ConnectionError("cancelled") from None

    monkeypatch.setattr(Commander, "_round_trip", connecting)
    redis = Commander(lambda: connect(redis_url, timeout=5, client_name="t"), name="cancelled")
    redis.start()
    task = next(task for task in asyncio.all_tasks() if task.get_name() == "redis-cancelled")
    reply = redis.call("PING")
    await entered.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    try:
        assert task.cancelled()
        with pytest.raises(StoreUnavailable):
            await reply
    finally:
        task.cancel()


async def test_replies_follow_their_commands(redis_url: str) -> None:
    """A caller that is cancelled in the middle of a call must not leave its reply to the next one."""
    from inference.redisio import connect

    redis = Commander(lambda: connect(redis_url, timeout=5, client_name="t"), name="t")
    redis.start()
    try:
        for number in range(300):
            await redis.call("SET", f"k{number}", number)
        tasks = []
        for number in range(300):
            tasks.append(asyncio.ensure_future(redis.call("GET", f"k{number}")))
            if number % 3 == 0:
                await asyncio.sleep(0)
                tasks[-1].cancel()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        for number, reply in enumerate(replies):
            if not isinstance(reply, asyncio.CancelledError):
                assert reply == str(number).encode()
    finally:
        await redis.stop()


async def test_an_outage_counts_from_its_beginning(redis_url: str) -> None:
    """A Redis that accepts and never answers is away since it was asked, not since the time-out."""
    from inference.redisio import connect

    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda r, w: writers.append(w), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    redis = Commander(lambda: connect(f"redis://127.0.0.1:{port}", timeout=0.5, client_name="t"), name="t")
    redis.start()
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await redis.call("PING")
        assert redis.outage() >= time.monotonic() - began - 0.1
    finally:
        await redis.stop()
        silent.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def test_round_trips_given_up_one_after_the_other_are_one_silence(
    fresh_valkey: Callable[[], EmbeddedValkey],
) -> None:
    """Reapers judge by the longest silence, and with a short time-out an outage has many round trips."""
    from inference.redisio import connect

    valkey = fresh_valkey()
    assert valkey.pid is not None
    redis = Commander(lambda: connect(valkey.url, timeout=0.3, client_name="t"), name="t")
    redis.start()
    try:
        await redis.call("PING")
        redis.take_longest()
        os.kill(valkey.pid, signal.SIGSTOP)
        began = time.monotonic()
        while time.monotonic() - began < 1.2:
            with pytest.raises(StoreUnavailable):
                await redis.call("PING")
            redis.take_longest()
        os.kill(valkey.pid, signal.SIGCONT)
        await eventually(lambda: _answers(redis))
        assert redis.take_longest() >= 1.1
        await redis.call("PING")
        assert redis.take_longest() < 1.0, "and only once"
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
        await redis.stop()


async def _answers(redis: Commander) -> bool:
    try:
        return bool(await redis.call("PING"))
    except StoreUnavailable:
        return False


async def test_a_commander_that_is_cancelled_closes_its_connection(redis_url: str, redis: redis_async.Redis) -> None:
    """Without that the connection stayed until somebody collected garbage."""
    name = f"cancelled-{os.getpid()}"
    commander = Commander(lambda: connect(redis_url, timeout=5.0, client_name=name), name=name)

    async def clients() -> int:
        return sum(client["name"] == name for client in await redis.client_list())

    commander.start()
    await commander.call("PING")
    assert await clients() == 1
    (task,) = [t for t in asyncio.all_tasks() if t.get_name() == f"redis-{name}"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    async def gone() -> bool:
        return await clients() == 0

    await eventually(gone, 5, what="the connection is closed")
