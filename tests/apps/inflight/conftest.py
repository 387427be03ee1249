"""A real gateway over a real Valkey; beside it a server and a worker that are heartbeats and no more."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import AsyncClient

from apps.inflight import owners
from apps.inflight.roster import roster
from inference.config import Config
from inference.gateway import Gateway
from inference.messages import EngineStats, Job, ModelInfo, PoolBeat, SamplingParams, ServerBeat, WorkerBeat, encode
from inference.store import Submission
from inference.store.store import Append
from sluice import runtime

WORKER = "w-test"
SERVER = "s-test"


class Bench:
    """Puts requests into the store without a worker process, and moves them on by hand."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.store = gateway.store

    async def beat(self, worker: str = WORKER, **extra: Any) -> None:
        values: dict[str, Any] = {
            "id": worker, "pool": "p-test", "host": "host", "pid": 7, "device": "cpu", "state": "ready",
            "models": [ModelInfo("scripted", "scripted", 4096, 4096, 8)],
            "stats": EngineStats(running=1, slots=8, blocks_total=100, blocks_used=25, step_seconds=2.0,
                                 generated_tokens=100, last_step_seconds=0.02),
            "started_ms": int(time.time() * 1000) - 5000, "version": "1", "rss_bytes": 3 * 2**20,
        }  # fmt: skip
        k = self.store.keys
        await self.store.redis.call(
            "SET", k.worker_beat(worker), encode(WorkerBeat(**{**values, **extra})), "PX", 600_000
        )
        await self.store.redis.call("SADD", k.workers, worker)

    async def pool(self, **extra: Any) -> None:
        values: dict[str, Any] = {
            "id": "p-test", "host": "host", "pid": 6, "workers": [WORKER], "starting": [], "models": ["scripted"],
            "restarts": 0, "started_ms": 1, "version": "1",
        }  # fmt: skip
        k = self.store.keys
        await self.store.redis.call(
            "SET", k.pool_beat("p-test"), encode(PoolBeat(**{**values, **extra})), "PX", 600_000
        )
        await self.store.redis.call("SADD", k.pools, "p-test")

    async def serve(self) -> None:
        """The server that holds the requests: not the gateway's own, which ends what it does not stream."""
        k = self.store.keys
        beat = ServerBeat(SERVER, "host", 5, "serving", {"http /v1/chat/completions": 2}, 2, 0, 1, "1")
        await self.store.redis.call("SET", k.server_beat(SERVER), encode(beat), "PX", 600_000)
        await self.store.redis.call("SADD", k.servers, SERVER)

    def submission(self, request_id: str, **extra: Any) -> Submission:
        job = Job(
            request_id,
            extra.pop("model", "scripted"),
            [1, 2, 3],
            SamplingParams(max_tokens=50),
            extra.pop("prompt_text", None),
        )
        values: dict[str, Any] = {"endpoint": "chat", "transport": "sse", "owner": "user:1", "client": "10.0.0.9"}
        return Submission(job, **{**values, **extra})

    async def submit(self, request_id: str, **extra: Any) -> None:
        await self.store.submit(self.submission(request_id, **extra), server=SERVER, slots=10**6)

    async def claim(self, count: int = 100, worker: str = WORKER) -> list[str]:
        return [c.id for c in await self.store.claim("scripted", worker, count)]

    async def token(self, request_id: str, seq: int) -> None:
        await self.store.append(WORKER, [Append(request_id, 1, seq, b"", 1, "", SERVER)], [])


@pytest.fixture(autouse=True)
def forget_everything() -> None:
    roster.expire()
    owners._names.clear()


@pytest.fixture
async def bench(make_config: Callable[..., Config]) -> AsyncIterator[Bench]:
    # Reaping is slow here: an orphan has to be seen before it is taken.
    config = make_config(reap_interval=30.0, heartbeat_interval=0.2, heartbeat_ttl=60.0)
    async with Gateway(config) as gateway:
        with runtime.replaced(gateway):
            bench = Bench(gateway)
            await bench.beat()
            await bench.serve()
            yield bench


def make_user(name: str, *permissions: str, **extra: Any) -> Any:
    user = get_user_model().objects.create_user(name, password="x", **{"is_staff": True, **extra})
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return user


@pytest.fixture
def browser_of(transactional_db: Any) -> Callable[..., Any]:
    """``await browser_of("ann", "view_inflight")``: a client signed in as staff with these permissions."""

    async def make(name: str, *permissions: str, **extra: Any) -> AsyncClient:
        client = AsyncClient()
        client.user = await sync_to_async(make_user)(name, *permissions, **extra)  # type: ignore[attr-defined]
        await client.aforce_login(client.user)  # type: ignore[attr-defined]
        return client

    return make


@pytest.fixture
async def boss(browser_of: Callable[..., Any]) -> AsyncClient:
    return await browser_of("boss", is_superuser=True)
