"""The count of replaced workers: a counter, so it never falls, whatever becomes of the pools."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from inference.store import RequestStore
from tests.core.conftest import Deploy, deploy  # noqa: F401
from tests.faults.harness import Rig, Server
from tests.support import eventually


async def test_a_report_that_is_repeated_counts_once(deploy: Deploy) -> None:
    """Also that of a pool that was taken for dead meanwhile, and one more pool beside it."""
    gateway = await deploy().gateway()
    store: RequestStore = gateway.store
    await gateway.redis.call("SADD", store.keys.pools, "p-1", "p-2")
    assert await store.count_restarts("p-1", 1, 0) == 1
    assert await store.count_restarts("p-1", 1, 0) == 1, "its reply was lost, and it says so again"
    assert await store.count_restarts("p-2", 2, 0) == 3
    assert await store.count_restarts("p-1", 3, 1) == 5
    await gateway.redis.call("SREM", store.keys.pools, "p-1")
    assert await store.count_restarts("p-2", 3, 2) == 6
    assert await gateway.redis.call("HEXISTS", store.keys.restarts, "p-1") == 0, "no entry for each pool there ever was"
    assert await store.count_restarts("p-1", 4, 3) == 7, "p-1 was only silent: what it knows to be counted is not again"
    assert await gateway.views.restarts() == 7


async def test_restarts_outlive_their_pools(tmp_path: Path) -> None:
    """A pool that leaves, and one that is killed, take nothing away from what servers show."""
    async with Rig(tmp_path) as rig:
        server, first = await asyncio.gather(rig.server(), rig.pool())
        seen = [await _restarts(server)]
        assert seen == [0]

        async def kill_a_worker() -> None:
            (worker,) = await rig.views.workers()
            os.kill(worker.pid, signal.SIGKILL)
            await eventually(lambda: _more(server, seen), 20, what="the restart is counted")
            await eventually(lambda: _other(rig, worker.id), 20, what="another worker serves")

        await kill_a_worker()
        await kill_a_worker()
        first.signal(signal.SIGTERM)
        await first.wait()
        seen.append(await _restarts(server))
        second = await rig.pool()
        seen.append(await _restarts(server))
        await kill_a_worker()
        second.signal(signal.SIGKILL)
        await second.wait()
        await eventually(lambda: _no_pool(rig), 10, what="nobody remembers the killed pool")
        seen.append(await _restarts(server))
        await rig.pool()
        await kill_a_worker()
        assert seen == sorted(seen), seen
        assert seen[-1] == 4


async def _restarts(server: Server) -> float:
    return (await server.scrape()).sum("sluice_worker_restarts_total")


async def _more(server: Server, seen: list[float]) -> bool:
    now = await _restarts(server)
    if now > seen[-1]:
        seen.append(now)
        return True
    assert now == seen[-1], "it fell"
    return False


async def _other(rig: Rig, dead: str) -> bool:
    return any(w.id != dead and w.state == "ready" for w in await rig.views.workers())


async def _no_pool(rig: Rig) -> bool:
    return await rig.views.pools() == []
