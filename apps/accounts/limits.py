"""Rate limits: how much each key and each user may use, counted in Redis for all servers together.

A request holds a *lease* from admission to its end::

    limiter = limiter_of(gateway)
    async with limiter.hold(principal.quotas, request_id, prompt_tokens=5, max_tokens=100) as lease:
        ...                     # generate
        lease.used = prompt + generated

Leaving the block, in whatever way, gives the lease back; that of a request which
goes on without its reader, when the request has ended. That is left to a task
of the limiter's own: the task that served a client may be the one being killed.
Leases of a server without a heartbeat do not count.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from apps.accounts.quota import Quota
from inference.errors import StoreUnavailable
from inference.redisio import Commander, Script

logger = logging.getLogger(__name__)

_LUA = Path(__file__).parent / "lua"
ACQUIRE, RELEASE = Script(_LUA / "acquire.lua"), Script(_LUA / "release.lua")

_WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "requests at once",
    "max_tokens": "answer tokens per request",
    "day_tokens": "tokens per day",
}


def _in_words(seconds: float) -> str:
    """``1 second``, ``42 seconds``, ``3 minutes``, ``5 hours``: never shorter than it is."""
    for unit, length in (("second", 1), ("minute", 60), ("hour", 3600)):
        count = max(1, math.ceil(seconds / length))
        if count < 90 or unit == "hour":
            break
    return f"{count} {unit}{'' if count == 1 else 's'}"


class LimitExceeded(Exception):
    """The caller has used up its share; reply 429.

    Attributes:
        limit: ``requests``, ``tokens``, ``concurrent``, ``max_tokens`` or ``day_tokens``.
        retry_after: seconds after which the same request will fit, or ``None``
            where it never will (then it is a 400 rather than a 429).
        headers: ``x-ratelimit-*``, for the reply.
    """

    def __init__(self, quota: Quota, limit: str, retry_after: float | None, headers: dict[str, str]) -> None:
        allowed = getattr(quota, limit)
        whose = "This API key" if quota.subject.startswith("key:") else "This user"
        text = f"{whose} is limited to {allowed} {_WORDS[limit]}."
        if retry_after is None:
            text += " The request asks for more than that at once."
        else:
            text += f" Try again in {_in_words(retry_after)}."
        super().__init__(text)
        self.limit = limit
        self.retry_after = retry_after
        self.headers = headers


class Lease:
    """What a request was granted. Set ``used`` (tokens) before leaving; it starts as all that was reserved.

    Attributes:
        headers: ``x-ratelimit-*``, for the reply; empty where nothing is limited.
        rest: set where the request may go on when the block has been left: waits for its end
            and gives what it has used in all.
    """

    __slots__ = ("headers", "rest", "used")

    def __init__(self, reserved: int, headers: dict[str, str]) -> None:
        self.used = reserved
        self.headers = headers
        self.rest: Callable[[], Awaitable[int]] | None = None


class Limiter:
    """The limits of one server process.

    Args:
        redis: the process's commander, kept open by its owner.
        prefix: of all keys.
        server: this server's id, whose heartbeat keeps its leases alive.
    """

    RETRY = 0.5
    """Seconds between tries to give a lease back while Redis does not answer."""
    MAX_TRIES = 120

    def __init__(self, redis: Commander, prefix: str, server: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._server = server
        self._releases: set[asyncio.Task[None]] = set()
        self._followed: set[asyncio.Task[None]] = set()
        self._stopped = False

    @property
    def pending(self) -> int:
        """Leases not yet given back."""
        return len(self._releases)

    async def wait_released(self) -> None:
        """Until every lease that was let go has been given back (or given up)."""
        while self._releases:
            await asyncio.gather(*self._releases, return_exceptions=True)

    async def stop(self) -> None:
        """Follow nothing any longer: what is not over counts with what is known to be used."""
        self._stopped = True
        for task in self._followed:
            task.cancel()
        await asyncio.gather(*self._followed, return_exceptions=True)

    @asynccontextmanager
    async def hold(
        self, quotas: Sequence[Quota], request_id: str, *, prompt_tokens: int, max_tokens: int, choices: int = 1
    ) -> AsyncIterator[Lease]:
        """A lease for one request; ``max_tokens`` is the most that one of its ``choices`` may have.

        Raises:
            LimitExceeded: nothing was counted.
            StoreUnavailable: Redis does not answer.
        """
        for quota in quotas:
            if quota.max_tokens and max_tokens > quota.max_tokens:
                raise LimitExceeded(quota, "max_tokens", None, {})
        reserve = (prompt_tokens + max_tokens) * choices
        metered = [q for q in quotas if q.metered]
        if not metered:
            yield Lease(reserve, {})
            return
        name = f"{self._server}|{request_id}"
        call = self._acquire(metered, name, reserve)
        try:
            reply = await asyncio.shield(call)
        except BaseException:
            # The grant may be there or on its way: take it back, counted as nothing used.
            self._release(metered, name, 0)
            raise
        headers = _headers(metered, reply)
        if not reply[0]:
            wait = int(reply[3])
            raise LimitExceeded(
                metered[int(reply[1]) - 1], reply[2].decode(), None if wait < 0 else wait / 1000, headers
            )
        lease = Lease(reserve, headers)
        try:
            yield lease
        finally:
            if lease.rest is None or self._stopped:
                self._release(metered, name, max(0, lease.used))
            else:
                self._follow(metered, name, lease, lease.rest)

    def _follow(self, quotas: Sequence[Quota], name: str, lease: Lease, rest: Callable[[], Awaitable[int]]) -> None:
        """Keep the lease until the request has ended."""

        async def wait() -> None:
            lease.used = await rest()

        task = asyncio.create_task(wait(), name=f"follow {name}")
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)
        # Not in the task, which may be cancelled before it has begun.
        task.add_done_callback(lambda _: self._release(quotas, name, max(0, lease.used)))

    def _acquire(self, quotas: Sequence[Quota], name: str, reserve: int) -> asyncio.Future[Any]:
        amounts = [n for q in quotas for n in (q.requests, q.tokens, q.concurrent, q.day_tokens)]
        return self._redis.script(ACQUIRE, self._keys(quotas), [self._prefix, name, reserve, *amounts])

    def _release(self, quotas: Sequence[Quota], name: str, used: int) -> None:
        # The command is queued here, before the task first runs: it goes out even in a process that is ending.
        args = [name, used, *(q.tokens for q in quotas)]
        first = self._redis.script(RELEASE, self._keys(quotas), args)
        task = asyncio.create_task(self._see_released(first, self._keys(quotas), args), name=f"release {name}")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _see_released(self, call: asyncio.Future[Any], keys: list[str], args: list[Any]) -> None:
        for _ in range(self.MAX_TRIES):
            try:
                await call
                return
            except StoreUnavailable:
                await asyncio.sleep(self.RETRY)
                call = self._redis.script(RELEASE, keys, args)
        call.cancel()
        logger.error("a rate limit lease could not be given back", extra={"event": "lease_lost"})

    def _keys(self, quotas: Sequence[Quota]) -> list[str]:
        kinds = ("requests", "tokens", "leases", "day")
        return [f"{self._prefix}limit:{kind}:{q.subject}" for q in quotas for kind in kinds]


_limiters: WeakKeyDictionary[Any, Limiter] = WeakKeyDictionary()


def limiter_of(gateway: Any) -> Limiter:
    """The limiter of a process: over its gateway's connection, alive with its gateway's heartbeat."""
    if gateway not in _limiters:
        _limiters[gateway] = Limiter(gateway.redis, gateway.config.redis_prefix, gateway.id)
    return _limiters[gateway]


async def stop(gateway: Any) -> None:
    """Before a gateway stops: its limiter gives back what it still follows."""
    if (limiter := _limiters.get(gateway)) is not None:
        await limiter.stop()


def _headers(quotas: Sequence[Quota], reply: Sequence[Any]) -> dict[str, str]:
    """``x-ratelimit-*`` of the tightest subject, for requests and tokens each."""
    headers: dict[str, str] = {}
    for kind, offset in (("requests", 0), ("tokens", 2)):
        limited = [
            (int(reply[4 + 4 * i + offset]), int(reply[5 + 4 * i + offset]), getattr(q, kind))
            for i, q in enumerate(quotas)
            if getattr(q, kind)
        ]
        if limited:
            left, reset_ms, limit = min(limited)
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(left)
            headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(reset_ms) / 1000:.3f}s"
    return headers
