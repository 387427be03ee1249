"""Hands what arrives on a server's channel to the streams that wait for it."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis

from inference.background import Background
from inference.errors import SluiceError, StoreUnavailable
from inference.gateway.ended import Detached, RequestEnded
from inference.gateway.stream import RequestStream
from inference.lifecycle import Outcome, Reason
from inference.messages import Claimed, Ended, ServerCommand, Step, Superseded, decode_server_message
from inference.redisio import Subscriber
from inference.store.store import RequestStore
from inference.ticks import next_tick

logger = logging.getLogger("sluice.hub")

_HELD_PAGE = 500
_BLOCKED_AFTER = 2.0
"""Seconds for which something must wait for a client before it is called slow."""
_BLOCKED_SHOWN = 100
"""Bounds what the heartbeat carries."""


class Hub:
    """Owns the subscription and the table of open streams of one server.

    Besides the fast path there is a bounded poll: once per ``check_interval``
    the hub asks the store which of its requests still exist and how long their
    logs are, so that a lost message costs a second and never a stream.
    """

    def __init__(
        self,
        store: RequestStore,
        dial: Callable[[], Redis],
        server: str,
        *,
        on_command: Callable[[ServerCommand], None],
        on_stray: Callable[[str], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._store = store
        self._on_tick = on_tick
        self._on_stray = on_stray
        self._strays: set[str] = set()
        self._server = server
        self._on_command = on_command
        self._streams: dict[str, list[RequestStream]] = {}
        self._task = Background("hub", self._tick)
        self._subscriber = Subscriber(
            dial,
            [store.keys.server_channel(server)],
            self._message,
            self._resync,
            timeout=store.config.redis_timeout,
            name=server,
        )

    def start(self) -> None:
        self._subscriber.start()
        self._task.start()

    async def wait_connected(self) -> None:
        await self._subscriber.wait_connected()

    async def stop(self) -> None:
        await self._task.stop()
        await self._subscriber.stop()

    def add(self, stream: RequestStream) -> None:
        self._streams.setdefault(stream.id, []).append(stream)

    def remove(self, stream: RequestStream) -> None:
        readers = self._streams.get(stream.id)
        if readers and stream in readers:
            readers.remove(stream)
            if not readers:
                del self._streams[stream.id]

    def streams(self) -> list[RequestStream]:
        return [s for readers in self._streams.values() for s in readers]

    def blocked(self) -> dict[str, int]:
        """Requests whose client takes nothing and since when (ms, wall clock): those that have waited longest."""
        now, wall = time.monotonic(), time.time()
        found = [(s.blocked_for(now), s.id) for s in self.streams()]
        longest = heapq.nlargest(_BLOCKED_SHOWN, (f for f in found if f[0] >= _BLOCKED_AFTER))
        return {request_id: int((wall - seconds) * 1000) for seconds, request_id in longest}

    # -- the fast path -----------------------------------------------------------------------------

    def _message(self, channel: str, data: bytes) -> None:
        try:
            message = decode_server_message(data)
        except msgspec.MsgspecError:
            logger.error("an unreadable message of %d bytes arrived", len(data), extra={"event": "bad_message"})
            return
        match message:
            case Step():
                now = time.monotonic()
                for part in message.frames:
                    for stream in self._streams.get(part.id, ()):
                        stream.feed(part.attempt, part.frame, now)
            case Claimed():
                for stream in self._streams.get(message.id, ()):
                    stream.claimed(message.attempt)
            case Ended():
                for stream in self._streams.get(message.id, ()):
                    stream.end(RequestEnded(message.outcome))
            case Superseded():
                self.overtaken(message.id, message.turn)
            case ServerCommand():
                self._on_command(message)

    def overtaken(self, request_id: str, turn: int) -> None:
        """Another reader has taken a stream over, as its ``turn``-th; those before it are done."""
        for stream in self._streams.get(request_id, ()):
            stream.overtaken(turn)

    def _resync(self) -> None:
        for stream in self.streams():
            stream.resync()

    # -- the bounded poll --------------------------------------------------------------------------

    async def _tick(self) -> None:
        config = self._store.config
        last_ping = time.monotonic()
        while True:
            await next_tick(config.check_interval)
            now = time.monotonic()
            if now - last_ping >= config.ping_interval:
                last_ping = now
                for stream in self.streams():
                    stream.ping()
            if self._store.redis.outage() > config.redis_outage_limit:
                self._fail_all()
                continue
            self._on_tick()
            try:
                await self._check()
                await self._find_strays()
            except StoreUnavailable:
                continue
            except SluiceError:
                logger.exception("the check of open streams failed", extra={"event": "check_failed"})

    async def _check(self) -> None:
        open_ids = [i for i, readers in self._streams.items() if any(s.admitted for s in readers)]
        for start in range(0, len(open_ids), _HELD_PAGE):
            page = open_ids[start : start + _HELD_PAGE]
            for request_id, length in zip(page, await self._store.held(page, "server", self._server), strict=True):
                if length >= 0:
                    for stream in self._streams.get(request_id, ()):
                        stream.logged(length)
                else:
                    await self._missing(request_id)

    async def _find_strays(self) -> None:
        """Requests that name this server and are not open here, twice in a row."""
        members = await self._store.redis.call("SMEMBERS", self._store.keys.of_server(self._server))
        found = {m.decode() for m in members} - self._streams.keys()
        for request_id in found & self._strays:
            self._on_stray(request_id)
        self._strays = found

    async def _missing(self, request_id: str) -> None:
        """The record is gone or another server's, and the message that said so was lost."""
        readers = [s for s in self._streams.get(request_id, ()) if s.admitted and s.ended is None and s.finish is None]
        if not readers:
            return
        server = await self._store.redis.call("HGET", self._store.keys.request(request_id), "server")
        outcome = await self._store.outcome(request_id) if server is None else None
        for stream in readers:
            if not stream.admitted or stream.complete:
                continue
            if server == b"":
                stream.end(Detached("This server was cut off and gave the stream up; attach again.", superseded=False))
            elif server is not None:
                stream.end(Detached("Another reader has taken over this stream.", superseded=True))
            else:
                stream.resync()
                stream.end(RequestEnded(outcome or Outcome.failed(Reason.STATE_LOST)))

    def _fail_all(self) -> None:
        for stream in self.streams():
            stream.end(RequestEnded(Outcome.failed(Reason.STATE_LOST), "Redis does not answer."))
