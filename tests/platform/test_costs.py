"""What one token and one request cost an API server, counted: bytes, allocations, queries.

The application runs here in the test's own process, and a stand-in for a worker gives it frames in
step with the client, so that nothing depends on how fast anything is.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db.backends.utils import CursorWrapper

from apps.accounts import auth, services
from apps.accounts.keycache import cache
from inference.config import Config
from inference.messages import EngineStats, Frame, ModelInfo, Step, StepFrame, WorkerBeat, encode
from inference.redisio import Commander, connect
from inference.store import RequestStore
from inference.store.records import Claim
from inference.store.store import Append
from inference.worker.sequence import raw
from sluice import runtime
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)

WORKER = "w-stand-in"


class StandIn:
    """Says that it serves the model, and does with requests what the test wants."""

    def __init__(self, config: Config) -> None:
        self.redis = Commander(lambda: connect(config.redis_url, timeout=5.0, client_name=WORKER), name=WORKER)
        self.store = RequestStore(self.redis, config, counts=False)

    async def start(self) -> None:
        self.redis.start()
        keys = self.store.keys
        beat = WorkerBeat(
            id=WORKER, pool="p", host="h", pid=1, device="cpu", state="ready", started_ms=0, version="0", restarts=0,
            held=0, models=[ModelInfo("scripted", "scripted", 100_000, 100_000, 8)], stats=EngineStats(),
        )  # fmt: skip
        await self.redis.call("SET", keys.worker_beat(WORKER), encode(beat))
        await self.redis.call("SADD", keys.workers, WORKER)

    async def claim(self) -> Claim:
        claims: list[Claim] = []

        async def taken() -> bool:
            claims.extend(await self.store.claim("scripted", WORKER, 1))
            return bool(claims)

        await eventually(taken, what="a request is queued")
        return claims[0]

    async def tell(self, claim: Claim, seq: int, text: str, finish: str | None = None) -> None:
        """One frame of one token."""
        frame = encode(Frame(seq, [seq % 256], text, finish))
        step = encode(Step(WORKER, [StepFrame(claim.id, claim.attempt, raw(frame))]))
        append = Append(claim.id, claim.attempt, seq, frame, seq, finish or "", claim.server)
        assert await self.store.append(WORKER, [append], [(claim.server, step)]) == []


class Client:
    """One POST to the application, as an ASGI server would make it."""

    def __init__(self, key: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        from sluice.asgi import application

        self.status = 0
        self.size = 0
        self.body = b""
        self.messages = 0
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self._moved = asyncio.Event()
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "root_path": "", "scheme": "http", "query_string": b"", "headers": headers,
            "client": ["127.0.0.1", 1], "server": ["127.0.0.1", 80], "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.task = asyncio.create_task(application(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body = message.get("body", b"")
            self.size += len(self.body)
            self.messages += bool(self.body)
        self._moved.set()

    async def more_than(self, messages: int) -> None:
        """Until so many body messages with content have come."""
        while self.messages <= messages:
            self._moved.clear()
            async with asyncio.timeout(30):
                await self._moved.wait()


@pytest.fixture
async def worker(make_config: Callable[..., Config]) -> AsyncIterator[StandIn]:
    """The application's gateway, started, and a worker that it sees."""
    config = make_config(
        heartbeat_interval=300.0, heartbeat_ttl=900.0, reap_interval=300.0, check_interval=300.0, ping_interval=300.0
    )
    stand_in = StandIn(config)
    await stand_in.start()
    await runtime.start(config)
    await eventually(lambda: not runtime.unready_reasons(), what="the server is ready")
    yield stand_in
    await auth.flush()
    await runtime.stop(5.0)
    await stand_in.redis.stop()


@pytest.fixture
async def key(worker: StandIn) -> str:
    created = await sync_to_async(services.create_key)(None, name="costs")
    return str(created.secret)


@asynccontextmanager
async def streaming(worker: StandIn, key: str, tokens: int) -> AsyncIterator[tuple[Client, Claim]]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": tokens}
    client = Client(key, body)
    yield client, await worker.claim()
    await client.task
    assert client.status == 200


async def answer(worker: StandIn, key: str, tokens: int, at: Callable[[int], None] = lambda seq: None) -> Client:
    """A streamed answer, each token sent when the one before has arrived."""
    async with streaming(worker, key, tokens) as (client, claim):
        await client.more_than(0)  # the role
        for seq in range(1, tokens + 1):
            before = client.messages
            await worker.tell(claim, seq, " word", "length" if seq == tokens else None)
            await client.more_than(before)
            at(seq)
    return client


async def test_bytes_per_token(worker: StandIn, key: str) -> None:
    """The part of an event that is not its text: name, id, model and what the API's form demands.

    Fails, for instance, where a usage of null is sent to clients that did not ask for it.
    """
    few, many = await answer(worker, key, 10), await answer(worker, key, 110)
    # Today it is 207.
    assert (many.size - few.size) / 100 <= len(" word") + 208, (few.size, many.size)


async def test_one_message_per_token_and_none_beside(worker: StandIn, key: str) -> None:
    """A token that comes alone is sent at once and alone; an answer has three more messages.

    Fails where the server waits to merge, or sends anything empty.
    """
    client = await answer(worker, key, 50)
    assert client.messages <= 50 + 2, client.messages


async def test_memory_per_token(worker: StandIn, key: str) -> None:
    """What a stream still holds of a token that has been sent: its text and when it came.

    Fails, for instance, where the frames, the deltas or the sent bytes of a stream are kept.
    """
    marks: dict[int, tuple[int, int]] = {}

    def at(seq: int) -> None:
        if seq % 50 == 0:
            gc.collect()
        if seq in (200, 1200):
            marks[seq] = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()

    await answer(worker, key, 50)
    tracemalloc.start()
    try:
        await answer(worker, key, 1201, at)
    finally:
        tracemalloc.stop()
    (held_early, _), (held_late, peak) = marks[200], marks[1200]
    # Counted: 74 bytes per token that stay; 290 kB that come and go, buffers of connections mostly.
    assert (held_late - held_early) / 1000 <= 95, marks
    assert peak - held_late <= 400_000, marks


async def test_queries_per_request(worker: StandIn, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is in use is believed for a moment: then a request asks the database nothing.

    Fails where ``keycache`` forgets, or anything of a request is looked up or written in the database.
    """
    queries: list[str] = []
    for name in ("execute", "executemany"):
        plain = getattr(CursorWrapper, name)

        def counted(self: Any, sql: str, *args: Any, plain: Any = plain) -> Any:
            queries.append(sql)
            return plain(self, sql, *args)

        monkeypatch.setattr(CursorWrapper, name, counted)
    monkeypatch.setattr(cache, "_ttl", 300.0)
    await answer(worker, key, 3)
    await auth.flush()
    # The key with its user, and the note of its last use.
    assert len(queries) <= 3, queries
    queries.clear()
    for _ in range(5):
        await answer(worker, key, 3)
    await auth.flush()
    assert queries == []
