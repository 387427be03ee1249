"""Limits over a real Valkey: exact under many callers, cancellation, crashes and several servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.accounts import quota as quota_module
from apps.accounts.limits import Lease, Limiter, LimitExceeded
from apps.accounts.principal import Principal
from apps.accounts.quota import Quota, quota_for
from inference.embedded import EmbeddedValkey
from inference.errors import ConfigError, StoreUnavailable
from inference.redisio import Commander, connect
from tests.support import eventually

PREFIX = "sluice:"


def commander(url: str) -> Commander:
    redis = Commander(lambda: connect(url, timeout=2, client_name="test"), name="test")
    redis.start()
    return redis


@pytest.fixture
async def redis_commander(redis_url: str) -> AsyncIterator[Commander]:
    redis = commander(redis_url)
    yield redis
    await redis.stop()


@pytest.fixture
async def server(redis_commander: Commander) -> AsyncIterator[Callable[..., Any]]:
    """``await server("s-1")``: a limiter whose server is alive."""
    limiters: list[Limiter] = []

    async def make(name: str, alive: bool = True) -> Limiter:
        if alive:
            await redis_commander.call("SET", f"{PREFIX}beat:server:{name}", "x", "PX", 60_000)
        limiters.append(Limiter(redis_commander, PREFIX, name))
        return limiters[-1]

    yield make
    for limiter in limiters:
        await limiter.wait_released()


def key(**limits: int) -> Quota:
    return Quota(subject="key:ab", **limits)


async def take(limiter: Limiter, quotas: list[Quota], name: str, prompt: int = 1, most: int = 9, **extra: Any) -> Lease:
    """Hold and give back at once, everything used."""
    async with limiter.hold(quotas, name, prompt_tokens=prompt, max_tokens=most, **extra) as lease:
        pass
    await limiter.wait_released()
    return lease


async def test_two_hundred_callers_on_two_servers_get_exactly_what_is_allowed(server: Any) -> None:
    one, two = await server("s-1"), await server("s-2")
    quotas = [key(requests=50), Quota(subject="user:1", requests=1000)]

    async def call(i: int) -> bool:
        try:
            await take((one, two)[i % 2], quotas, f"r-{i}")
        except LimitExceeded as exc:
            assert exc.limit == "requests" and exc.retry_after is not None and 0 < exc.retry_after <= 1.2
            return False
        return True

    admitted = sum(await asyncio.gather(*(call(i) for i in range(200))))
    # The bucket goes on filling while the calls run, by less than one a second.
    assert 50 <= admitted <= 52


async def test_concurrent_requests_are_never_more_than_allowed(server: Any) -> None:
    one, two = await server("s-1"), await server("s-2")
    now, most, refused = 0, 0, 0
    release = asyncio.Event()

    async def call(i: int) -> None:
        nonlocal now, most, refused
        try:
            async with (one, two)[i % 2].hold([key(concurrent=7)], f"r-{i}", prompt_tokens=1, max_tokens=1):
                now += 1
                most = max(most, now)
                await release.wait()
                now -= 1
        except LimitExceeded as exc:
            assert exc.limit == "concurrent"
            refused += 1
            if refused == 93:
                release.set()

    async with asyncio.timeout(20):
        await asyncio.gather(*(call(i) for i in range(100)))
    assert (most, refused) == (7, 93)
    await take(one, [key(concurrent=7)], "after")


async def test_unused_tokens_come_back(server: Any) -> None:
    limiter = await server("s-1")
    quotas = [key(tokens=1000)]
    async with limiter.hold(quotas, "a", prompt_tokens=100, max_tokens=800) as lease:
        assert lease.headers["x-ratelimit-limit-tokens"] == "1000"
        assert lease.headers["x-ratelimit-remaining-tokens"] == "100"
        with pytest.raises(LimitExceeded) as refused:
            await take(limiter, quotas, "b", 100, 800)
        # 800 are missing, and 1000 come back in a minute.
        assert refused.value.retry_after == pytest.approx(48, abs=1)
        lease.used = 150
    await limiter.wait_released()
    lease = await take(limiter, quotas, "c", 100, 700)
    assert int(lease.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(50, abs=20)
    assert float(lease.headers["x-ratelimit-reset-tokens"][:-1]) == pytest.approx(57, abs=1.5)


async def test_several_choices_count_several_times(server: Any) -> None:
    limiter = await server("s-1")
    with pytest.raises(LimitExceeded) as refused:
        await take(limiter, [key(tokens=100)], "a", 10, 20, choices=4)
    assert refused.value.retry_after is None and "asks for more than that" in str(refused.value)
    await take(limiter, [key(tokens=120)], "b", 10, 20, choices=4)


async def test_refusal_counts_nothing(server: Any, redis: Any) -> None:
    limiter = await server("s-1")
    quotas = [key(requests=5, tokens=1000), Quota(subject="user:1", requests=2)]
    await take(limiter, quotas, "a")
    await take(limiter, quotas, "b")
    for i in range(10):
        with pytest.raises(LimitExceeded, match="This user is limited to 2 requests per minute"):
            await take(limiter, quotas, f"refused-{i}")
    lease = await take(limiter, [key(requests=5, tokens=1000)], "c")
    assert lease.headers["x-ratelimit-remaining-requests"] == "2", "only the three admitted were counted"
    assert not await redis.hlen(f"{PREFIX}limit:leases:key:ab")


async def test_answer_length_is_checked_without_redis() -> None:
    limiter = Limiter(None, PREFIX, "s-1")  # type: ignore[arg-type]
    with pytest.raises(LimitExceeded, match="answer tokens per request") as refused:
        await take(limiter, [key(max_tokens=10)], "a", 1, 11)
    assert refused.value.retry_after is None
    assert (await take(limiter, [key(max_tokens=10)], "a", 1, 10)).headers == {}, "nothing to count: not asked"


async def test_daily_budget(server: Any, redis: Any) -> None:
    limiter = await server("s-1")
    quotas = [key(day_tokens=100)]
    async with limiter.hold(quotas, "a", prompt_tokens=10, max_tokens=50) as lease:
        with pytest.raises(LimitExceeded):  # what runs is reserved
            await take(limiter, quotas, "b", 10, 50)
        lease.used = 30
    await limiter.wait_released()
    await take(limiter, quotas, "c", 10, 60)
    with pytest.raises(LimitExceeded) as refused:
        await take(limiter, quotas, "d", 1, 0)
    assert refused.value.limit == "day_tokens"
    seconds, _ = await redis.time()
    assert refused.value.retry_after == pytest.approx(86400 - seconds % 86400, abs=2)
    await redis.hset(f"{PREFIX}limit:day:key:ab", "day", seconds // 86400 - 1)  # yesterday's
    await take(limiter, quotas, "e", 10, 60)
    assert await redis.hget(f"{PREFIX}limit:day:key:ab", "used") == b"70"


async def test_leases_of_a_dead_server_do_not_count(server: Any, redis: Any) -> None:
    dead, alive = await server("s-dead"), await server("s-1")
    quotas = [key(concurrent=2, day_tokens=1000)]
    stack = AsyncExitStack()
    for i in range(2):
        await stack.enter_async_context(dead.hold(quotas, f"r-{i}", prompt_tokens=1, max_tokens=400))
    with pytest.raises(LimitExceeded):
        await take(alive, quotas, "a")
    await redis.delete(f"{PREFIX}beat:server:s-dead")
    await take(alive, quotas, "a", 1, 900)
    await stack.aclose()


async def test_cancelled_at_every_step_leaves_no_lease(server: Any, redis: Any) -> None:
    limiter = await server("s-1")
    quotas = [key(concurrent=1, tokens=1000)]

    async def run(name: str) -> None:
        async with limiter.hold(quotas, name, prompt_tokens=1, max_tokens=9):
            await asyncio.Event().wait()

    for steps in range(12):
        task = asyncio.create_task(run(f"r-{steps}"))
        for _ in range(steps):
            await asyncio.sleep(0)
        if steps == 11:
            while not await redis.hlen(f"{PREFIX}limit:leases:key:ab"):
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await limiter.wait_released()
        assert await redis.hgetall(f"{PREFIX}limit:leases:key:ab") == {}, steps


async def test_a_request_that_goes_on_keeps_its_lease_until_it_ends_or_its_server_stops(
    server: Any, redis: Any
) -> None:
    limiter = await server("s-1")
    quotas = [key(concurrent=1, day_tokens=100)]
    over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def leave(name: str) -> None:
        async with limiter.hold(quotas, name, prompt_tokens=1, max_tokens=29) as lease:
            lease.used, lease.rest = 5, lambda: over

    async def used(tokens: int) -> None:
        async def counted() -> bool:
            return int(await redis.hget(f"{PREFIX}limit:day:key:ab", "used") or 0) == tokens

        await eventually(counted, what=f"{tokens} tokens are counted")

    await leave("a")
    with pytest.raises(LimitExceeded):
        await take(limiter, quotas, "b")
    over.set_result(20)
    await used(20)
    over = asyncio.get_running_loop().create_future()
    await leave("c")
    await limiter.stop()
    await used(25)
    await leave("d")
    await used(30)


async def test_lease_is_given_back_when_redis_is_back(fresh_valkey: Callable[[], EmbeddedValkey]) -> None:
    valkey = fresh_valkey()
    redis = commander(valkey.url)
    limiter = Limiter(redis, PREFIX, "s-1")
    limiter.RETRY = 0.05  # type: ignore[misc]
    stack = AsyncExitStack()
    await stack.enter_async_context(limiter.hold([key(concurrent=1)], "a", prompt_tokens=1, max_tokens=1))
    real = redis.script
    down = True

    def script(*args: Any) -> asyncio.Future[Any]:
        if not down:
            return real(*args)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(StoreUnavailable("Redis does not answer."))
        return future

    redis.script = script  # type: ignore[method-assign]
    await stack.aclose()
    with pytest.raises(StoreUnavailable):
        await take(limiter, [key(concurrent=1)], "b")
    assert limiter.pending == 2
    down = False
    await limiter.wait_released()
    await redis.call("SET", f"{PREFIX}beat:server:s-1", "x")
    await take(limiter, [key(concurrent=1)], "c")
    await redis.stop()


async def test_every_key_has_an_end(server: Any, redis: Any) -> None:
    limiter = await server("s-1")
    everything = key(requests=10, tokens=1000, concurrent=3, day_tokens=10_000)
    async with limiter.hold([everything], "a", prompt_tokens=1, max_tokens=1):
        pass
    async with limiter.hold([everything], "b", prompt_tokens=1, max_tokens=1):
        names = [n async for n in redis.scan_iter(f"{PREFIX}limit:*")]
        assert len(names) == 4
        for name in names:
            assert await redis.pttl(name) > 0, name


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=30),
    st.integers(1, 500),
)
def test_bucket_never_holds_more_than_its_limit(calls: list[tuple[int, int]], limit: int) -> None:
    """Against a model: what was admitted and used is never more than the bucket and its refill."""

    async def run() -> None:
        redis = commander(URL[0])
        await redis.call("FLUSHALL")
        await redis.call("SET", f"{PREFIX}beat:server:s-1", "x")
        limiter = Limiter(redis, PREFIX, "s-1")
        used = 0
        start = asyncio.get_running_loop().time()
        for i, (most, real) in enumerate(calls):
            try:
                async with limiter.hold([key(tokens=limit)], f"r-{i}", prompt_tokens=0, max_tokens=most) as lease:
                    lease.used = min(real, most)
            except LimitExceeded as exc:
                assert (exc.retry_after is None) == (most > limit)
                continue
            await limiter.wait_released()
            used += lease.used
        refill = (asyncio.get_running_loop().time() - start) * limit / 60
        assert used <= limit + refill + 1
        await redis.stop()

    asyncio.run(run())


URL: list[str] = []


@pytest.fixture(autouse=True)
def remember_url(valkey: EmbeddedValkey) -> None:
    URL[:] = [valkey.url]


# --- Settings ---


def test_defaults_and_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_LIMIT_REQUESTS", "60")
    monkeypatch.setenv("SLUICE_LIMIT_DAY_TOKENS", " 1000 ")
    quota_module.defaults.cache_clear()
    try:
        quota = quota_for("key:x", {"requests": None, "tokens": 5, "day_tokens": 0})
        assert quota == Quota(subject="key:x", requests=60, tokens=5)
        for bad in ("-1", "many", "1.5", "٣"):
            monkeypatch.setenv("SLUICE_LIMIT_TOKENS", bad)
            quota_module.defaults.cache_clear()
            with pytest.raises(ConfigError, match="SLUICE_LIMIT_TOKENS"):
                quota_module.defaults()
    finally:
        monkeypatch.undo()
        quota_module.defaults.cache_clear()


def test_quotas_survive_a_ticket() -> None:
    principal = Principal("key:x", 1, False, frozenset({"read"}), ("m",), "x", "key", (key(tokens=5),))
    import json

    assert Principal.from_dict(json.loads(json.dumps(principal.to_dict()))) == principal
