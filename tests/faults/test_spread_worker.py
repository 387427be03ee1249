"""A worker whose model is spread over two processes lives and dies as one (``cpu+cpu``; on GPUs ``cuda:0+cuda:1``)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.rig import write_tiny_model
from tests.faults.harness import Rig
from tests.faults.transports import Call
from tests.support import eventually


def partner(worker: int) -> psutil.Process:
    """The process that shares the worker's model."""
    (other,) = psutil.Process(worker).children()
    return other


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_whichever_process_dies_the_stream_goes_on(make_rig: Callable[..., Any], tmp_path: Path) -> None:
    """First the other process is killed, then the first: each time both end, and the answer is the undisturbed one."""
    model = tmp_path / "tiny"
    model.mkdir()
    write_tiny_model(model)
    rig: Rig = await make_rig(
        SLUICE_MODELS=f"tiny={model}", SLUICE_DEVICES="cpu+cpu", SLUICE_CACHE_TOKENS=4096, SLUICE_DTYPE="float32",
        SLUICE_MAX_RUNNING=4, SLUICE_HEARTBEAT_INTERVAL=1, SLUICE_HEARTBEAT_TTL=5, SLUICE_MAX_ATTEMPTS=3,
        OMP_NUM_THREADS=1,
    )  # fmt: skip
    pool, server = await asyncio.gather(rig.pool(), rig.server())
    fields = {"model": "tiny", "prompt": "both", "temperature": 0.9, "seed": 3}
    whole = (await (await Call.begin(rig, server, "sse-generate", 1200, **fields)).finish()).text
    call = await Call.begin(rig, server, "sse-generate", 1200, **fields)
    call.reading()
    for number, first_dies in enumerate((False, True)):
        view = await rig.running(call.id, 20 + 300 * number, 60)
        pid = await rig.worker_pid(view.worker)
        both = [psutil.Process(pid), partner(pid)]
        os.kill(both[0 if first_dies else 1].pid, signal.SIGKILL)
        await eventually(lambda both=both: all(map(gone, both)), 5, what="both are gone")
        await eventually(lambda old=view.worker: _elsewhere(rig, call.id, old), 60, what="another worker has it")
    reply = await call.finish()
    assert (reply.done, reply.finish, reply.error) == (True, "length", None)
    assert reply.text == whole
    await rig.quiet()
    (worker,) = await rig.views.workers()
    last = partner(worker.pid)
    pool.signal(signal.SIGTERM)
    assert await pool.wait(30) == 0
    assert gone(last)


async def _elsewhere(rig: Rig, request_id: str, worker: str) -> bool:
    view = await rig.views.view(request_id)
    return view is not None and view.state == "running" and view.worker != worker


async def test_what_cannot_be_spread_is_refused_at_start(make_rig: Callable[..., Any]) -> None:
    rig: Rig = await make_rig(SLUICE_DEVICES="cuda:0+cuda:1")
    status, said = await rig.command("runworker")
    assert status == 1
    assert "cuda:0+cuda:1 spreads one transformers model" in said and "scripted (scripted)" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_device_that_only_torch_misses_ends_the_pool(make_rig: Callable[..., Any], tmp_path: Path) -> None:
    """Workers used to be started one after the other for ever, and the pool said no more than how they ended."""
    model = tmp_path / "tiny"
    model.mkdir()
    write_tiny_model(model)
    rig: Rig = await make_rig(
        SLUICE_MODELS=f"tiny={model}", SLUICE_DEVICES="cpu,cuda:2", CUDA_VISIBLE_DEVICES="97,98,99",
        SLUICE_CACHE_TOKENS=4096, OMP_NUM_THREADS=1,
    )  # fmt: skip
    pool = rig.spawn("runworker")
    assert await pool.wait(180) == 1
    *_, last = lines = pool.log().splitlines()
    assert last == "error: a worker on cuda:2 cannot start as it is configured (the reason stands above)"
    (reason,) = [line for line in lines if "cannot start: SLUICE_DEVICES (--devices): torch cannot use cuda:99" in line]
    assert "built without CUDA" in reason or "finds 0 of them" in reason
    assert "starting another" not in pool.log() and "Traceback" not in pool.log()
    assert await rig.views.pools() == []
