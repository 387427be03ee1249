"""Publish/subscribe on a connection of its own, which notices when the network is gone.

A reader of a dead connection gets nothing and no error. So the subscriber
pings, and reconnects when neither a message nor an answer comes. Messages may
be lost meanwhile: after each (re)connection it calls ``on_connect``, and its
owner reads the truth from storage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from inference.background import Background

logger = logging.getLogger("sluice.redis")

_LAST_BACKOFF = 1.0


class Subscriber:
    """Delivers messages of ``channels`` to ``on_message(channel, data)``, in order.

    Both callbacks run in the subscriber's task and must not block.
    """

    def __init__(
        self,
        connect: Callable[[], Redis],
        channels: Sequence[str],
        on_message: Callable[[str, bytes], None],
        on_connect: Callable[[], None],
        *,
        timeout: float,
        name: str,
    ) -> None:
        self._connect = connect
        self._channels = list(channels)
        self._on_message = on_message
        self._on_connect = on_connect
        self._timeout = timeout
        # A silence is looked at two more times before it has lasted ``timeout``.
        self._ping_after = timeout / 2.5
        self._name = name
        self._task = Background(f"subscriber-{name}", self._run)
        self._up = asyncio.Event()

    def start(self) -> None:
        self._task.start()

    async def wait_connected(self) -> None:
        await self._up.wait()

    async def stop(self) -> None:
        """Idempotent."""
        await self._task.stop()

    async def _run(self) -> None:
        backoff = 0.05
        while True:
            redis = self._connect()
            try:
                await self._listen(redis)
            except (RedisError, OSError, TimeoutError) as exc:
                if self._up.is_set():
                    logger.warning(
                        "subscription lost (%s), reconnecting",
                        type(exc).__name__,
                        extra={"event": "redis_unsubscribed"},
                    )
                    backoff = 0.05
            finally:
                self._up.clear()
                await _close(redis)
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _LAST_BACKOFF)

    async def _listen(self, redis: Redis) -> None:
        pubsub = redis.pubsub()
        try:
            await pubsub.subscribe(*self._channels)
            waiting = len(self._channels)
            heard = time.monotonic()
            pinged = False
            while True:
                message = await pubsub.get_message(timeout=self._ping_after)
                now = time.monotonic()
                if message is None:
                    if now - heard > self._timeout:
                        raise TimeoutError("no answer to a ping")
                    if not pinged:
                        await pubsub.ping()
                        pinged = True
                    continue
                heard, pinged = now, False
                kind = message["type"]
                if kind == "message":
                    self._on_message(message["channel"].decode(), message["data"])
                elif kind == "subscribe" and waiting:
                    waiting -= 1
                    if not waiting:
                        self._up.set()
                        self._on_connect()
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]


async def _close(redis: Redis) -> None:
    try:
        await redis.aclose()
    except (RedisError, OSError, TimeoutError):
        logger.debug("closing a broken subscription", exc_info=True)
