"""A device without memory, in the middle of a step, in a real worker process with the real engine (WF-08)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.rig import write_tiny_model
from tests.faults.harness import Rig
from tests.faults.transports import Call
from tests.support import eventually

#: Makes the forward pass of a worker fail once, as soon as a file appears (and takes the file away).
HOOK = """
import importlib.abc, importlib.machinery, os, sys

NAME, MARK = "inference.engine.transformers.loop", os.environ.get("TEST_OUT_OF_MEMORY")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            wrap(module.BatchingLoop)

        spec.loader.exec_module = exec_module
        return spec


def wrap(loop):
    start = loop.start

    def patched(self, on_end):
        self.manager.model.register_forward_pre_hook(fail)
        start(self, on_end)

    loop.start = patched


def fail(*_):
    import torch

    try:
        os.unlink(MARK)
    except FileNotFoundError:
        return
    raise torch.OutOfMemoryError("CUDA out of memory, says the test")


if MARK:
    sys.meta_path.insert(0, Finder())
"""
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 1.2, "seed": 3, "top_k": 20},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {"65": 5}},
    {"temperature": 0.7, "seed": 4, "min_p": 0.1},
]


@pytest.mark.timeout(180)
async def test_wf_08_out_of_memory_in_a_step_loses_no_request(
    make_rig: Callable[..., Any], tmp_path: Path, timing: Callable[[str, float, float], None]
) -> None:
    """Eight mixed streams; the step fails; a new worker takes all of them up where they were, once."""
    model, hook, mark = tmp_path / "tiny", tmp_path / "hook", tmp_path / "out-of-memory"
    model.mkdir()
    hook.mkdir()
    write_tiny_model(model)
    (hook / "sitecustomize.py").write_text(HOOK)
    rig: Rig = await make_rig(
        SLUICE_MODELS=f"tiny={model}", SLUICE_CACHE_TOKENS=8192, SLUICE_DTYPE="float32", SLUICE_MAX_RUNNING=8,
        SLUICE_HEARTBEAT_INTERVAL=1, SLUICE_HEARTBEAT_TTL=5, OMP_NUM_THREADS=1,
    )  # fmt: skip
    path = f"{hook}:{rig.settings['PYTHONPATH']}"
    _, server = await asyncio.gather(rig.pool(1, PYTHONPATH=path, TEST_OUT_OF_MEMORY=mark), rig.server())

    async def begin(number: int, **more: Any) -> Call:
        fields = {"model": "tiny", "prompt": f"prompt {number}", **PARAMS[number], **more}
        return await Call.begin(rig, server, "sse-generate", 300, **fields)

    undisturbed = [(await (await begin(n)).finish()).text for n in range(8)]
    (worker,) = await rig.views.workers()
    calls = [await begin(n) for n in range(8)]
    for call in calls:
        call.reading()
    for call in calls:
        await rig.running(call.id, 20)
    began = asyncio.get_running_loop().time()
    mark.touch()
    await eventually(lambda: _another(rig, worker.id), 60, what="another worker serves")
    timing("out of memory in a step: another worker serves", asyncio.get_running_loop().time() - began, 30)
    replies = [await call.finish() for call in calls]
    assert [(r.done, r.finish, r.error) for r in replies] == [(True, "length", None)] * 8
    assert [r.text for r in replies] == undisturbed
    assert not mark.exists()
    await rig.quiet()
    (now,) = await rig.views.workers()
    assert (now.restarts, now.stats.blocks_used) == (1, 0)
    assert now.rss_bytes < 1.3 * worker.rss_bytes, "memory is back to where it was"
    assert not os.path.exists(f"/proc/{worker.pid}")
    log = "".join(p.log() for p in rig._processes)
    assert "out of memory, says the test" in log
    after = await begin(0)
    assert (await after.finish()).text == undisturbed[0]


async def _another(rig: Rig, old: str) -> bool:
    return any(w.id != old and w.state == "ready" for w in await rig.views.workers())
