"""The scripts themselves, called as any process may call them: races, fencing, fairness, bounds, retention.

Every test runs on Valkey, on a cluster node (one slot, prefix ``{sluice}:``), behind a password and TLS,
and on Debian's Redis where it is installed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_sync

from inference.config import Config
from inference.embedded import find_binary
from inference.errors import Overloaded, StoreUnavailable
from inference.lifecycle import Outcome, Reason
from inference.messages import Abort, Ended, Frame, decode_frame, decode_server_message, decode_worker_message, encode
from inference.reaper import Reaper
from inference.redisio import Commander, connect
from inference.store import RequestStore, StoreViews, audit
from inference.store.store import Append
from tests.conftest import skip_or_fail
from tests.core.conftest import spec
from tests.support import eventually, eventually_sync, find_free_port

FINISHED = Outcome.finished("length")
GONE = Outcome.cancelled(Reason.CLIENT_GONE)


class Backend:
    """A server to run the scripts on, and how to reach it."""

    def __init__(self, url: str, prefix: str = "sluice:") -> None:
        self.url = url
        self.prefix = prefix


def _launch(folder: Path, binary: str, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    command = [binary, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder), *arguments]
    with open(folder / f"{port}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _certificate(folder: Path) -> list[str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    crt, key = str(folder / "tls.crt"), str(folder / "tls.key")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", crt, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return [crt, key]


@pytest.fixture(scope="module", params=["valkey", "cluster", "tls", "sentinel", "redis"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp(request.param)
    port = find_free_port()
    plain = ["--port", str(port)]
    probe: dict[str, Any] = {"port": port}
    url, prefix, binary, more = f"redis://127.0.0.1:{port}/0", "sluice:", find_binary(), []
    if request.param in ("redis", "tls"):
        # The Valkey that comes from the package index is built without TLS.
        found = os.environ.get("SLUICE_TEST_REDIS") or shutil.which("redis-server")
        if not found:
            skip_or_fail("no redis-server on the PATH (Debian: redis-server)")
        binary = str(found)
    if request.param == "cluster":
        plain += ["--cluster-enabled", "yes", "--cluster-port", str(find_free_port())]
        prefix = "{sluice}:"
    elif request.param == "tls":
        crt, key = _certificate(folder)
        plain = ["--port", "0", "--tls-port", str(port), "--tls-cert-file", crt, "--tls-key-file", key]
        plain += ["--tls-ca-cert-file", crt, "--tls-auth-clients", "no", "--requirepass", "pa:ss/word"]
        probe |= {"ssl": True, "ssl_ca_certs": crt, "password": "pa:ss/word"}
        url = f"rediss://:pa%3Ass%2Fword@localhost:{port}/0?ssl_ca_certs={crt}"
    processes = [_launch(folder, binary, port, *plain)]
    if request.param == "sentinel":
        sentinel = find_free_port()
        conf = folder / "sentinel.conf"
        conf.write_text(f"port {sentinel}\nsentinel monitor main 127.0.0.1 {port} 1\n")
        processes.append(subprocess.Popen([binary, str(conf), "--sentinel"], stdout=subprocess.DEVNULL))
        url = f"redis+sentinel://127.0.0.1:{sentinel}/main/0"
    try:
        _wait(processes[0], probe, folder / f"{port}.log", request.param)
        if request.param == "cluster":
            more = ["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]
            with redis_sync.Redis(port=port) as client:
                client.execute_command(*more)
                eventually_sync(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER INFO")) or
                                client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")  # fmt: skip
        if request.param == "sentinel":
            with redis_sync.Redis(port=sentinel) as client:
                eventually_sync(lambda: _pings(client))
        yield Backend(url, prefix)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], probe: dict[str, Any], log: Path, name: str) -> None:
    with redis_sync.Redis(**probe) as client:

        def up() -> bool:
            if process.poll() is not None:
                if name == "tls" and "tls" in log.read_text().lower():
                    skip_or_fail("this redis-server is built without TLS")
                raise AssertionError(log.read_text())
            return _pings(client)

        eventually_sync(up)


def _pings(client: redis_sync.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis_sync.RedisError:
        return False


Make = Callable[..., RequestStore]


@pytest.fixture
async def make(backend: Backend) -> AsyncIterator[Make]:
    """Makes stores with connections of their own, as processes of their own would have."""
    made: list[Commander] = []

    def build(**overrides: Any) -> RequestStore:
        values = {"heartbeat_interval": 0.1, "heartbeat_ttl": 0.5, "reap_interval": 0.1, **overrides}
        config = Config(redis_url=backend.url, redis_prefix=backend.prefix, models="scripted=scripted:", **values)
        redis = Commander(lambda: connect(config.redis_url, timeout=5, client_name="t"), name=f"t{len(made)}")
        redis.start()
        made.append(redis)
        return RequestStore(redis, config)

    first = build()
    await first.redis.call("FLUSHALL")
    yield build
    for redis in made:
        await redis.stop()


async def add(store: RequestStore, *, server: str = "s1", max_tokens: int = 8, **options: Any) -> str:
    """Queue a request; gives its id."""
    submission = spec(max_tokens, **options)
    await store.submit(submission, server=server, slots=8)
    return submission.job.id


def frame(
    seq: int, request_id: str, *, attempt: int = 1, finish: str = "", server: str = "s1", shown: bool = True
) -> Append:
    data = encode(Frame(seq, [seq], f"t{seq}" if shown else "", finish or None))
    return Append(request_id, attempt, seq, data, seq, finish, server, shown)


async def alive(store: RequestStore, kind: str, name: str) -> None:
    beat = getattr(store.keys, f"{kind}_beat")(name)
    await store.redis.call("SET", beat, "x", "PX", 60_000)
    await store.redis.call("SADD", getattr(store.keys, f"{kind}s"), name)


async def bare(store: RequestStore) -> set[str]:
    """Keys that are left, beyond what may be."""
    cursor: Any = b"0"
    keys: set[str] = set()
    while True:
        cursor, page = await store.redis.call("SCAN", cursor, "COUNT", 500)
        keys |= {k.decode() for k in page}
        if not int(cursor):
            return {
                k
                for k in keys
                if not k.endswith(("history", "outcomes", "usage", "servers", "workers")) and "beat:" not in k
            }


@pytest.mark.parametrize("state", ["queued", "running", "finishing"])
async def test_fifty_settle_at_once_and_one_wins(make: Make, state: str) -> None:
    stores = [make() for _ in range(5)]
    request_id = await add(stores[0])
    if state != "queued":
        await stores[0].claim("scripted", "w1", 1)
    if state == "finishing":
        await stores[0].append("w1", [frame(1, request_id, finish="length")], [])
    outcomes = [FINISHED, GONE, Outcome.cancelled(Reason.ADMIN), Outcome.failed(Reason.WORKER_LOST)]
    endings = await asyncio.gather(
        *(stores[i % 5].settle(request_id, outcomes[i % 4], server="s1" if i % 2 else "") for i in range(50))
    )
    assert sum(e is not None for e in endings) == 1
    counts = await StoreViews(stores[0].redis, stores[0].keys).outcomes()
    assert sum(counts.values()) == 1
    assert len(await StoreViews(stores[0].redis, stores[0].keys).history()) == 1
    assert await bare(stores[0]) == set(), "record, log, queue, fairness and indexes all go in that step"


async def test_settle_sends_one_abort_and_tells_the_server(make: Make, backend: Backend) -> None:
    store = make()
    listener = connect(backend.url, timeout=5, client_name="listener")
    pubsub = listener.pubsub()
    await pubsub.subscribe(store.keys.worker_channel("w1"), store.keys.server_channel("s1"))
    heard: list[Any] = []

    async def listen() -> None:
        async for message in pubsub.listen():
            if message["type"] == "message":
                to_worker = b"worker" in message["channel"]
                heard.append((decode_worker_message if to_worker else decode_server_message)(message["data"]))

    task = asyncio.create_task(listen())
    try:

        async def subscribed() -> bool:
            return (await store.redis.call("PUBSUB", "NUMSUB", store.keys.server_channel("s1")))[1] > 0

        await eventually(subscribed)
        request_id = await add(store)
        await store.claim("scripted", "w1", 1)
        for _ in range(3):
            await store.settle(request_id, Outcome.cancelled(Reason.ADMIN))
        await store.tell_server("s1", encode(Ended("last", GONE)))
        await eventually(lambda: any(isinstance(m, Ended) and m.id == "last" for m in heard), 5)
        assert [m for m in heard if isinstance(m, Abort)] == [Abort(request_id, 1)]
        assert [m.id for m in heard if isinstance(m, Ended)] == [request_id, "last"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pubsub.aclose()
        await listener.aclose()


async def test_settle_guard(make: Make) -> None:
    store = make()
    request_id = await add(store, server="s1")
    assert await store.settle(request_id, GONE, guard=("server", "s2")) is None
    assert await store.settle(request_id, GONE, guard=("server", "s1")) is not None
    assert await bare(store) == set(), "one call is enough to take every entry away"


async def test_claims_race_and_each_request_goes_once(make: Make) -> None:
    stores = [make() for _ in range(4)]
    ids = [await add(stores[0], max_tokens=3) for _ in range(100)]
    claims = await asyncio.gather(*(stores[i % 4].claim("scripted", f"w{i}", 3) for i in range(60)))
    taken = [c.id for group in claims for c in group]
    assert sorted(taken) == sorted(ids) and len(set(taken)) == 100


async def test_a_claim_skips_what_has_ended(make: Make) -> None:
    store = make()
    first, second = await add(store), await add(store)
    await store.settle(first, GONE)
    await store.redis.call("ZADD", store.keys.queue("scripted"), 1, first)
    assert [c.id for c in await store.claim("scripted", "w1", 8)] == [second]
    assert await store.redis.call("EXISTS", store.keys.request(first)) == 0, "nothing is brought back"


async def test_submit_twice_after_a_lost_reply(make: Make) -> None:
    store = make()
    submission = spec(4)
    await store.submit(submission, server="s1", slots=1)
    await store.submit(submission, server="s1", slots=1)
    assert await store.redis.call("ZCARD", store.keys.queue("scripted")) == 1
    assert len(await store.claim("scripted", "w1", 8)) == 1


async def test_append_takes_each_frame_once_and_in_order(make: Make) -> None:
    store = make()
    request_id = await add(store)
    await store.claim("scripted", "w1", 1)
    assert await store.append("w1", [frame(1, request_id)], []) == []
    assert await store.append("w1", [frame(1, request_id)], []) == [], "sent again after a lost reply"
    assert await store.append("w1", [frame(2, request_id)], []) == []
    assert await store.append("w1", [frame(1, request_id)], []) == [], "much later still"
    assert await store.append("w1", [frame(5, request_id)], []) == [(0, "gap", "")]
    log = [decode_frame(f).seq for f in await store.read_log(request_id, 0, 100)]
    assert log == [1, 2]
    assert await store.redis.call("HGET", store.keys.request(request_id), "tokens") == b"2"


async def test_the_first_token_is_the_first_that_shows(make: Make) -> None:
    store = make()
    views = StoreViews(store.redis, store.keys)
    request_id = await add(store)
    await store.claim("scripted", "w1", 1)

    async def first_and_last() -> tuple[int, int]:
        view = await views.view(request_id)
        assert view is not None
        return view.first_token_ms, view.last_token_ms

    await store.append("w1", [frame(1, request_id, shown=False), frame(2, request_id, shown=False)], [])
    first, last = await first_and_last()
    assert (first, last > 0) == (0, True)
    await store.append("w1", [frame(3, request_id, shown=False), frame(4, request_id)], [])
    first, last = await first_and_last()
    assert first == last > 0
    await store.append("w1", [frame(5, request_id)], [])
    assert (await first_and_last())[0] == first


async def test_append_is_fenced_by_worker_and_attempt(make: Make) -> None:
    store = make()
    request_id = await add(store)
    await store.claim("scripted", "w1", 1)
    await store.append("w1", [frame(1, request_id)], [])
    assert await store.requeue(request_id, worker="w1", lost=True) == "requeued"
    assert await store.append("w1", [frame(2, request_id)], []) == [(0, "stale", "")]
    (claim,) = await store.claim("scripted", "w2", 1)
    assert (claim.attempt, [decode_frame(f).seq for f in claim.log]) == (2, [1])
    assert await store.append("w1", [frame(2, request_id)], []) == [(0, "stale", "")]
    assert await store.append("w2", [frame(2, request_id)], []) == [(0, "stale", "")], "an older attempt of its own"
    assert await store.append("w2", [frame(2, request_id, attempt=2)], []) == []
    assert await store.settle(request_id, GONE) is not None
    assert await store.append("w2", [frame(3, request_id, attempt=2)], []) == [(0, "stale", "")]
    assert await bare(store) == set(), "a record that is gone is not brought back"


async def test_requeue_counts_lost_workers_only(make: Make) -> None:
    store = make(max_attempts=2)
    request_id = await add(store)
    for number in range(4):
        await store.claim("scripted", f"w{number}", 1)
        assert await store.requeue(request_id, worker=f"w{number}", lost=False) == "requeued"
    await store.claim("scripted", "w5", 1)
    assert await store.requeue(request_id, worker="w4", lost=True) == "gone"
    assert await store.requeue(request_id, worker="w5", lost=True) == "requeued"
    await store.claim("scripted", "w6", 1)
    assert await store.requeue(request_id, worker="w6", lost=True) == "exhausted"


async def test_requeued_goes_before_the_rest_of_its_class(make: Make) -> None:
    store = make()
    first = await add(store)
    await store.claim("scripted", "w1", 1)
    later = [await add(store) for _ in range(3)]
    urgent = await add(store, priority="high")
    await store.requeue(first, worker="w1", lost=True)
    order = [c.id for c in await store.claim("scripted", "w2", 8)]
    assert order == [urgent, first, *later]


async def test_one_owners_backlog_delays_only_that_owner(make: Make) -> None:
    store = make(max_queued=2000)
    for _ in range(1000):
        store.submit(spec(4, owner="key:many"), server="s1", slots=8)
    await store.claim("scripted", "w1", 10)
    one = await add(store, owner="key:one")
    order = [c.id for c in await store.claim("scripted", "w1", 8)]
    assert one in order[:2]


async def test_priorities(make: Make) -> None:
    store = make()
    low, normal, high = [await add(store, priority=p) for p in ("low", "normal", "high")]
    assert [c.id for c in await store.claim("scripted", "w1", 8)] == [high, normal, low]


async def test_queue_bound(make: Make) -> None:
    store = make(max_queued=2)
    results = await asyncio.gather(
        *(store.submit(spec(4), server="s1", slots=3) for _ in range(30)), return_exceptions=True
    )
    assert sum(isinstance(r, tuple) for r in results) == 5, "three slots and two places"
    assert all(isinstance(r, (tuple, Overloaded)) for r in results)
    assert await store.redis.call("ZCARD", store.keys.live) == 5


async def test_detach_attach_and_the_end_of_grace(make: Make) -> None:
    store = make()
    views = StoreViews(store.redis, store.keys)
    reaper = Reaper(store, views, lambda ending: None)
    await alive(store, "server", "s2")
    plain, kept = await add(store), await add(store, resumable=True)
    assert (await store.detach(plain, server="s1", grace=1))[0] == "fixed"
    assert (await store.detach(kept, server="other", grace=1))[0] == "gone"
    assert (await store.detach(kept, server="s1", grace=60))[0] == "detached"
    assert await store.attach(kept, server="s2", reader="r", owner="key:foreign") == "foreign"
    assert await store.attach(plain, server="s2", reader="r") == "fixed"
    assert not isinstance(await store.attach(kept, server="s2", reader="r", owner="key:test"), str)
    assert await store.redis.call("ZSCORE", store.keys.detached, kept) is None
    await reaper.reap()
    view = await views.view(kept)
    assert view is not None and view.server == "s2", "attached: the grace time no longer counts"
    assert (await store.detach(kept, server="s2", grace=0.001))[0] == "detached"

    async def reaped() -> bool:
        await reaper.reap()
        return await views.view(kept) is None

    await eventually(reaped)
    ending = await store.ending(kept)
    assert ending is not None and ending.reason == "client_gone"


async def test_reaper_ends_the_requests_of_a_dead_server(make: Make) -> None:
    store = make()
    views = StoreViews(store.redis, store.keys)
    reaper = Reaper(store, views, lambda ending: None)
    await alive(store, "worker", "w1")
    await store.redis.call("SADD", store.keys.servers, "s1")
    plain, kept, done = await add(store), await add(store, resumable=True), await add(store, resumable=True)
    await store.claim("scripted", "w1", 8)
    await store.append("w1", [frame(1, done, finish="stop")], [])
    await reaper.reap()
    assert await views.view(plain) is None and await views.view(done) is None
    view = await views.view(kept)
    assert view is not None and view.phase == "detached"
    reasons = {e.id: (e.state, e.reason) for e in await views.history()}
    assert reasons == {plain: ("cancelled", "client_gone"), done: ("finished", "stop")}
    await store.settle(kept, GONE)
    assert (await audit(store)).findings == []


@pytest.mark.parametrize(("certain", "times"), [(True, 2), (False, 6)])
async def test_reaper_requeues_then_fails(make: Make, certain: bool, times: int) -> None:
    """A worker that only fell silent may live, on a machine under load: that counts a third."""
    store = make(max_attempts=2)
    views = StoreViews(store.redis, store.keys)
    reaper = Reaper(store, views, lambda ending: None)
    await alive(store, "server", "s1")
    request_id = await add(store)
    for turn in range(times):
        await store.claim("scripted", "w1", 1)
        await store.redis.call("SADD", store.keys.workers, "w1")
        await (reaper.dead_worker("w1", certain=True) if certain else reaper.reap())
        view = await views.view(request_id)
        assert (view.state if view else None) == ("queued" if turn < times - 1 else None)
    (ending,) = await views.history()
    assert (ending.state, ending.reason, ending.attempts) == ("failed", "worker_lost", times)


async def test_reaper_repairs_what_no_index_names(make: Make) -> None:
    """A record whose owners' indexes were lost, and an index entry whose record was lost."""
    store = make()
    views = StoreViews(store.redis, store.keys)
    reaper = Reaper(store, views, lambda ending: None)
    lost = await add(store, server="dead")
    await store.redis.call("DEL", store.keys.of_server("dead"))
    ghost = await add(store)
    await store.redis.call("DEL", store.keys.request(ghost))
    await reaper.reap()
    await reaper.reap()
    assert await views.view(lost) is None
    assert await store.redis.call("ZCARD", store.keys.live) == 0


async def test_reaper_does_not_judge_after_an_outage(make: Make) -> None:
    """While Redis stood still nobody could beat: its first round after that kills nobody."""
    store = make()
    views = StoreViews(store.redis, store.keys)
    reaper = Reaper(store, views, lambda ending: None)
    request_id = await add(store, server="s1")
    await store.redis.call("SADD", store.keys.servers, "s1")
    reaper._distrust()
    await reaper.reap()
    assert await views.view(request_id) is not None

    async def reaped() -> bool:
        await reaper.reap()
        return await views.view(request_id) is None

    await eventually(reaped, 5)


async def test_an_ending_is_told_once_however_often_it_is_doubted(make: Make) -> None:
    """The reply of the settling is lost, and the reader hears of the ending too, before or after it is recovered."""
    store = make()
    command = RequestStore(store.redis, store.config, counts=False)
    lost, foreign, known = await add(store), await add(store), await add(store)
    call = store.redis.script

    async def lossy(*args: Any) -> Any:
        await call(*args)
        raise StoreUnavailable("the reply was lost")

    store.redis.script = lossy  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await store.settle(lost, GONE)
    store.redis.script = call  # type: ignore[method-assign]
    assert await command.settle(foreign, GONE) is not None
    assert await store.settle(known, GONE) is not None
    for again in (False, True):
        store.doubt(lost)
        store.doubt(foreign)
        store.doubt(known)
        assert {e.id for e in await store.recover()} == (set() if again else {lost, foreign})


async def test_logs_are_kept_for_their_time_only(make: Make) -> None:
    store = make(log_retention=0.3)
    plain, kept = await add(store), await add(store, resumable=True)
    await store.claim("scripted", "w1", 8)
    for request_id in (plain, kept):
        await store.append("w1", [frame(1, request_id)], [])
        await store.settle(request_id, GONE)
    assert await store.redis.call("EXISTS", store.keys.log(plain)) == 0
    assert 0 < await store.redis.call("PTTL", store.keys.log(kept)) <= 300
    entries = [decode_frame(f) for f in await store.read_log(kept, 0, 9)]
    assert [e.finish for e in entries] == [None, "cancelled:client_gone"]

    async def expired() -> bool:
        return await bare(store) == set()

    await eventually(expired, 5)


async def test_queue_timeout_counts_until_claimed(make: Make) -> None:
    store = make(queue_timeout=0.2)
    views = StoreViews(store.redis, store.keys)
    reaper = Reaper(store, views, lambda ending: None)
    await alive(store, "server", "s1")
    await alive(store, "worker", "w1")
    claimed = await add(store)
    await store.claim("scripted", "w1", 1)
    waiting = await add(store)

    async def reaped() -> bool:
        await reaper.reap()
        return await views.view(waiting) is None

    await eventually(reaped, 5)
    assert await views.view(claimed) is not None


async def test_the_audit_finds_each_kind_of_disagreement(make: Make) -> None:
    store = make()
    k, call = store.keys, store.redis.call
    await alive(store, "server", "s1")
    await alive(store, "worker", "w1")

    async def finds(what: str, *plant: Any, **request: Any) -> None:
        await call("FLUSHALL")
        await alive(store, "server", "s1")
        await alive(store, "worker", "w1")
        request_id = await add(store, **request)
        assert (await audit(store)).findings == []
        await call(*(p(request_id) if callable(p) else p for p in plant))
        findings = (await audit(store)).findings
        assert any(what in f for f in findings), findings

    await finds("missing in live", "ZREM", k.live, lambda i: i)
    await finds("missing in deadlines", "ZREM", k.deadlines, lambda i: i)
    await finds("missing in queue", "ZREM", k.queue("scripted"), lambda i: i)
    await finds("missing in of:server", "SREM", k.of_server("s1"), lambda i: i)
    await finds("has no heartbeat", "DEL", k.server_beat("s1"))
    await finds("no server, and not resumable", "HSET", lambda i: k.request(i), "server", "")
    await finds("live names", "DEL", lambda i: k.request(i))
    await finds("queue:scripted names ghost", "ZADD", k.queue("scripted"), 1, "ghost")
    await finds("deadlines names ghost", "ZADD", k.deadlines, 1, "ghost")
    await finds("detached names ghost", "ZADD", k.detached, 1, "ghost")
    await finds("running:scripted names ghost", "SADD", k.running("scripted"), "ghost")
    await finds("of:worker:w1 names ghost", "SADD", k.of_worker("w1"), "ghost")
    await finds("of:server:s1 names ghost", "SADD", k.of_server("s1"), "ghost")
    # The record is there, is queued, and says that it is on s1.
    await finds("running:scripted names r", "SADD", k.running("scripted"), lambda i: i)
    await finds("of:worker:w1 names r", "SADD", k.of_worker("w1"), lambda i: i)
    await finds("of:server:s2 names r", "SADD", k.of_server("s2"), lambda i: i)
    await finds("queue:other names r", "ZADD", k.queue("other"), 1, lambda i: i)
    await finds("detached names r", "ZADD", k.detached, 1, lambda i: i)
    await finds("queue:scripted names r", "HSET", lambda i: k.request(i), "state", "running", "worker", "w1")
    await finds("without a TTL", "RPUSH", k.log("ghost"), "x")
    await finds("has no TTL", "SET", k.end("ghost"), "x")
    await finds("has no TTL", "SET", k.worker_beat("w9"), "x")
    await finds("fairness state", "HSET", k.fair("other"), "v:1", "1")
    await finds("unknown key", "SET", k.prefix + "stray", "x")
    await finds("its worker w7", "HSET", lambda i: k.request(i), "state", "running", "worker", "w7")
