"""A pool as the rest of the deployment sees it while its worker is away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from inference.config import Config
from inference.messages import WorkerBeat
from inference.pool import supervisor
from inference.pool.supervisor import Supervisor
from tests.support import eventually

MODEL = "scripted=scripted:rate=200"


async def test_a_worker_that_died_counts_as_coming_until_the_next_one_starts(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the pool named the dead one among its workers for as long as it paused, up to half a minute.

    Nothing was coming then, so new requests were refused and those that waited ended after 20 s.
    """
    monkeypatch.setenv("SLUICE_MODELS", MODEL)
    monkeypatch.setattr(supervisor, "_FIRST_BACKOFF", 600.0)
    # A frozen one would be killed, and on a busy machine it may look frozen: that is not what dies here.
    pool = Supervisor(make_config(models=MODEL, heartbeat_ttl=30.0), ["cpu"], models=["scripted"])
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0)  # it connects to Redis first

    async def says(workers: list[str], starting: int) -> bool:
        (beat,) = await pool.views.pools()
        return beat.workers == workers and len(beat.starting) == starting

    async def serving() -> list[WorkerBeat]:
        return [w for w in await pool.views.workers() if w.state == "ready"]

    try:
        (worker,) = await eventually(serving, 40, what="the worker serves")
        await eventually(lambda: says([worker.id], 0), what="the pool names it")
        os.kill(worker.pid, signal.SIGKILL)
        await eventually(lambda: says([], 1), 20, what="the pool says that one is coming")
    finally:
        pool.drain()
        assert await asyncio.wait_for(running, 30) == 0
