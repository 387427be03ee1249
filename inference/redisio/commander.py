"""Commands to Redis through one connection that one task owns.

Everything asked for while a round trip is under way goes out together in the
next one, so that the number of round trips follows the clock of Redis and not
the number of callers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from redis.asyncio import Redis
from redis.exceptions import (
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from inference import metrics
from inference.errors import SluiceError, StoreUnavailable

logger = logging.getLogger("sluice.redis")

_BATCH = 512
_FIRST_BACKOFF = 0.05
_LAST_BACKOFF = 1.0


class Script:
    """A Lua script kept as its own file, called by its digest."""

    __slots__ = ("name", "sha", "source")
    known: ClassVar[list[Script]] = []
    """Every script there is; a new connection loads them all."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.source = path.read_text(encoding="utf-8")
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        Script.known.append(self)


class _Call:
    __slots__ = ("args", "future", "script")

    def __init__(self, args: tuple[Any, ...], script: Script | None, future: asyncio.Future[Any]) -> None:
        self.args = args
        self.script = script
        self.future = future

    @property
    def name(self) -> str:
        return self.script.name if self.script else str(self.args[0])


class Commander:
    """Owns one connection; :meth:`call` and :meth:`script` return futures.

    A caller that is cancelled abandons its future; the command still runs and
    its reply is read by the owner. A command that fails with a connection error
    is *not* repeated: its future raises :class:`StoreUnavailable`, and the next
    command reconnects.
    """

    def __init__(self, connect: Callable[[], Redis], *, name: str) -> None:
        self._connect = connect
        self._name = name
        self._redis: Redis | None = None
        self._pending: list[_Call] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.down_since: float | None = None
        """``time.monotonic()`` at which the first failed round trip since the last success began, or ``None``."""
        self._denied: set[str] = set()
        """What was refused in this outage, as by a replica; reads may be answered all the while."""
        self._answered = False
        self._longest = 0.0
        self.round_trips = 0
        self.commands = 0
        self.errors = 0

    def start(self) -> None:
        if self._task is None:
            self._closing = False
            self._task = asyncio.create_task(self._run(), name=f"redis-{self._name}")

    async def stop(self) -> None:
        """Send what is pending, then close. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        self._closing = True
        self._wake.set()
        await task

    def call(self, *args: Any) -> asyncio.Future[Any]:
        """Queue one command; the future gives its reply or raises StoreUnavailable."""
        return self._queue(args, None)

    def script(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> asyncio.Future[Any]:
        """Queue one script call (EVALSHA; the source is sent where Redis lacks it)."""
        return self._queue((len(keys), *keys, *args), script)

    def _queue(self, args: tuple[Any, ...], script: Script | None) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._task is None or self._closing:
            future.set_exception(StoreUnavailable("the connection to Redis is closed"))
            return future
        self._pending.append(_Call(args, script, future))
        self._wake.set()
        return future

    def outage(self) -> float:
        """Seconds for which Redis has not answered; 0 while it does."""
        return 0.0 if self.down_since is None else time.monotonic() - self.down_since

    def take_longest(self) -> float:
        """Seconds of the longest time without an answer since this was asked last: a round trip, or an outage."""
        longest, self._longest = self._longest, 0.0
        return longest

    async def _run(self) -> None:
        try:
            await self._serve()
        finally:
            await self._disconnect()

    async def _serve(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            await self._wake.wait()
            batch, self._pending = self._pending[:_BATCH], self._pending[_BATCH:]
            if not self._pending:
                self._wake.clear()
            if not batch:
                if self._closing:
                    return
                continue
            began = time.monotonic()
            try:
                await self._round_trip(batch)
                backoff = _FIRST_BACKOFF
            except (RedisError, OSError, TimeoutError) as exc:
                await self._failed(batch, exc, began)
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # The library made an error of its own of it, and would have it forgotten.
                    raise asyncio.CancelledError from exc
                if not self._closing:
                    await asyncio.sleep(backoff)
                backoff = min(backoff * 2, _LAST_BACKOFF)
            except Exception as exc:
                # The edge of this task, on which everything waits: one of the commands could not even be written.
                logger.exception("%d commands are given up", len(batch), extra={"event": "redis_commands_refused"})
                await self._refused(batch, exc)
            self._longest = max(self._longest, time.monotonic() - began)
            if self._closing:
                self._wake.set()

    async def _round_trip(self, batch: list[_Call]) -> None:
        if self._redis is None:
            self._redis = self._connect()
            # So that a script missing there is not run after those that were asked for later.
            await self._load_scripts(self._redis)
        replies = await self._execute(self._redis, batch, by_digest=True)
        missing = [c for c, r in zip(batch, replies, strict=True) if isinstance(r, NoScriptError)]
        for call, reply in zip(batch, replies, strict=True):
            if not isinstance(reply, NoScriptError):
                self._resolve(call, reply)
        if missing:
            for call, reply in zip(missing, await self._execute(self._redis, missing, by_digest=False), strict=True):
                self._resolve(call, reply)
        if self.down_since is not None and self._is_over(batch):
            logger.warning("Redis answers again after %.1f s", self.outage(), extra={"event": "redis_up"})
            # Several round trips that were given up, each after a short time, are one long silence.
            self._longest = max(self._longest, self.outage())
            self.down_since = None
            self._denied.clear()
        self._answered = True

    def _is_over(self, batch: list[_Call]) -> bool:
        """Whether this successful round trip ends an outage. Where that is a refusal, heartbeats show its end."""
        return not self._denied or any(call.name == "SET" or call.name in self._denied for call in batch)

    @staticmethod
    async def _load_scripts(redis: Redis) -> None:
        pipe = redis.pipeline(transaction=False)
        for script in Script.known:
            pipe.execute_command("SCRIPT LOAD", script.source)
        await pipe.execute(raise_on_error=False)

    async def _execute(self, redis: Redis, batch: list[_Call], *, by_digest: bool) -> list[Any]:
        pipe = redis.pipeline(transaction=False)
        for call in batch:
            if call.script is None:
                pipe.execute_command(*call.args)
            elif by_digest:
                pipe.execute_command("EVALSHA", call.script.sha, *call.args)
            else:
                pipe.execute_command("EVAL", call.script.source, *call.args)
        self.round_trips += 1
        self.commands += len(batch)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for call, reply in zip(batch, replies, strict=True):
            if isinstance(reply, RedisError) and (not isinstance(reply, ResponseError) or _is_outage(reply)):
                if isinstance(reply, ResponseError):
                    self._denied.add(call.name)
                raise reply
        return replies

    def _resolve(self, call: _Call, reply: Any) -> None:
        if call.future.done():
            return
        if isinstance(reply, Exception):
            error = SluiceError(f"Redis refused {call.name}: {reply}")
            error.__cause__ = reply
            call.future.set_exception(error)
        else:
            call.future.set_result(reply)

    async def _refused(self, batch: list[_Call], exc: Exception) -> None:
        for call in batch:
            if not call.future.done():
                error = SluiceError(f"a command could not be sent ({type(exc).__name__})")
                error.__cause__ = exc
                call.future.set_exception(error)
                call.future.exception()  # as below
        await self._disconnect()

    async def _failed(self, batch: list[_Call], exc: BaseException, began: float) -> None:
        self.errors += 1
        metrics.REDIS_ERRORS.inc()
        if self.down_since is None:
            self.down_since = began
            # One that never answered is for whoever is starting to tell; it has the error.
            level = logging.WARNING if self._answered else logging.DEBUG
            logger.log(level, "Redis does not answer: %s", type(exc).__name__, extra={"event": "redis_down"})
        for call in batch:
            if not call.future.done():
                error = StoreUnavailable(f"Redis does not answer ({type(exc).__name__})")
                error.__cause__ = exc
                call.future.set_exception(error)
                # The caller may be gone; an unread exception is then no news.
                call.future.exception()
        await self._disconnect()

    async def _disconnect(self) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            try:
                await redis.aclose()
            except (RedisError, OSError, TimeoutError):
                logger.debug("closing a broken connection to Redis", exc_info=True)


#: The library has classes of its own for these, and takes the codes from their texts.
_PASSING = (ReadOnlyError, ClusterDownError, TryAgainError, OutOfMemoryError)
#: As an error of their own, or as what a script met with (how Redis 6.2 tells it).
_CODES = re.compile(r"(^|-)(READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|MISCONF|BUSY|OOM) ")


def _is_outage(reply: ResponseError) -> bool:
    """A failover, a start-up, a full memory or disk: a state that passes, not an answer to this command."""
    return isinstance(reply, _PASSING) or _CODES.search(str(reply)) is not None
