"""The checks that need an NVIDIA GPU, in one run of under eight minutes; ``make gpu-check``.

Needs no network: model folder and packages must be there. On a machine without a
package index, install from a folder of wheels first::

    pip install --no-index --find-links wheels/ -r requirements.txt -r requirements-dev.txt

Without a GPU it says "skipped" and exits 0. Otherwise it prints one line per
check and exits 1 where one failed::

    python scripts/gpu_check.py [--model DIR] [--device cuda:0] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
LIMIT = 470.0
"""Seconds for everything."""
KILLS = 20


class Check:
    """What a check needs: where to run, on which model, and how long it may take."""

    def __init__(self, device: str, tiny: str, model: str | None, *, kills: int = KILLS) -> None:
        self.device = device
        self.tiny = tiny
        self.model = model
        self.kills = kills
        self.deadline = time.monotonic() + LIMIT

    def left(self) -> float:
        return max(5.0, self.deadline - time.monotonic())


class Skipped(Exception):
    """A check that cannot run here; its message says why."""


def contract(check: Check) -> str:
    """The contract suite and the engine's own tests, on the device, in float32."""
    env = {**os.environ, "SLUICE_TEST_DEVICE": check.device}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not openai and not scripted",
    ]
    done = subprocess.run(
        [*command, "tests/engine/test_contract.py", "tests/engine/test_transformers_engine.py"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=check.left(),
        check=False,
    )
    last = (done.stdout.strip().splitlines() or ["nothing printed"])[-1]
    if done.returncode:
        raise AssertionError(f"{last}\n{done.stdout[-3000:]}")
    return last


def attention(check: Check) -> str:
    """bfloat16 on the device: which attention, whether CUDA graphs, and that a batch runs."""

    async def run() -> str:
        rig = await _rig(check.tiny, check.device, dtype="auto")
        engine = rig.engine
        settings = engine._batching.manager.continuous_batching_config
        jobs = [_job(f"a{i}", max_tokens=40, temperature=i % 2, top_p=0.9) for i in range(8)]
        answers = await rig.run_all(jobs)
        assert all(len(answer.ids) == 40 for answer in answers)
        await rig.quiet()
        model = engine._loaded.model
        graphs = any(settings.cuda_graph_booleans)
        text = f"{str(model.dtype).removeprefix('torch.')}, {model.config._attn_implementation}, CUDA graphs {graphs}"
        await engine.close()
        return text

    return asyncio.run(run())


def graphs(check: Check) -> str:
    """With CUDA graphs forced on, every request keeps its own sampling parameters."""

    async def answers(force: bool) -> list[list[int]]:
        from inference.engine.transformers import loop as module

        original = module.batching_config

        def forced(*args: Any, **named: Any) -> Any:
            settings = original(*args, **named)
            settings.use_cuda_graph = force
            settings.q_padding_interval_size, settings.kv_padding_interval_size = 16, 256
            return settings

        module.batching_config = forced
        try:
            rig = await _rig(check.tiny, check.device)
        finally:
            module.batching_config = original
        jobs = [
            _job(f"a{i}", prompt=[97 + i] * (5 + i), max_tokens=20, temperature=(i % 3) / 2, seed=i, top_k=i % 4 * 20)
            for i in range(24)
        ]
        result = [answer.ids for answer in await rig.run_all(jobs)]
        await rig.engine.close()
        return result

    if not check.device.startswith("cuda"):
        raise Skipped("CUDA graphs need CUDA")
    plain, captured = asyncio.run(answers(False)), asyncio.run(answers(True))
    same = sum(a == b for a, b in zip(plain, captured, strict=True))
    assert same >= len(plain) - 2, f"only {same} of {len(plain)} answers agree with those without graphs"
    return f"{same} of {len(plain)} answers equal without graphs"


def memory(check: Check) -> str:
    """What the engine takes is the weights, the cache it announced and a bounded rest; closing frees it."""
    import torch

    if not check.device.startswith("cuda"):
        raise Skipped("device memory needs CUDA")
    before = torch.cuda.memory_allocated(check.device)

    async def run() -> tuple[int, int]:
        rig = await _rig(check.tiny, check.device)
        await rig.run_all([_job(f"a{i}", max_tokens=60) for i in range(16)])
        weights = sum(p.numel() * p.element_size() for p in rig.engine._loaded.model.parameters())
        planned = weights + rig.engine._batching.cache.cache_tensor.numel()
        taken = torch.cuda.memory_allocated(check.device) - before
        await rig.engine.close()
        rig.engine.__dict__.clear()
        return planned, taken

    planned, taken = asyncio.run(run())
    import gc

    gc.collect()
    kept = torch.cuda.memory_allocated(check.device) - before
    mib = 2**20
    assert taken <= planned + 256 * mib, f"{taken // mib} MiB taken, {planned // mib} planned"
    assert kept <= 32 * mib, f"{kept // mib} MiB still held after close"
    return f"{taken / mib:.0f} MiB taken, {planned / mib:.0f} planned, {kept / mib:.0f} kept after close"


def parallel(check: Check) -> str:
    """One model over two devices answers as it does on one."""
    import torch

    two = "cpu+cpu"
    if check.device.startswith("cuda"):
        two = "cuda:0+cuda:1"
        if torch.cuda.device_count() < 2:
            raise Skipped("one model over several devices needs two of them")

    async def answers(device: str) -> list[list[int]]:
        rig = await _rig(check.tiny, device)
        jobs = [
            _job(f"a{i}", prompt=[97 + i] * (5 + 40 * i), max_tokens=20, temperature=i % 2, seed=i) for i in range(8)
        ]
        result = [answer.ids for answer in await rig.run_all(jobs)]
        await rig.engine.close()
        return result

    one, spread = asyncio.run(answers(check.device)), asyncio.run(answers(two))
    same = sum(a == b for a, b in zip(one, spread, strict=True))
    assert same >= len(one) - 1, f"only {same} of {len(one)} answers agree with those of one device"
    return f"{same} of {len(one)} answers on {two} equal those on {check.device}"


def failover(check: Check) -> str:
    """Kill the worker of one sampled stream again and again: its text is the undisturbed one."""
    from proofs.failover import prove

    with tempfile.TemporaryDirectory() as folder:
        proof = asyncio.run(
            prove(
                Path(folder),
                models=f"m={check.tiny}",
                device=check.device,
                kills=check.kills,
                seed=5,
                temperature=1.0,
            )
        )
    assert proof.same, proof.verdict()
    return proof.verdict()


def bench(check: Check) -> str:
    """The table of benchmarks/bench_engine.py on the real model."""
    if check.model is None:
        raise Skipped("no model folder; manage.py fetchmodel brings one")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_engine", "--model", check.model, "--device", check.device],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=check.left(),
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    return "\n" + done.stdout.rstrip()


CHECKS: dict[str, Callable[[Check], str]] = {
    check.__name__: check for check in (attention, graphs, memory, parallel, failover, contract, bench)
}


def _job(name: str, prompt: Any = "hello", **params: Any) -> Any:
    from tests.engine.rig import job

    return job(name, prompt, ignore_eos=True, **params)


async def _rig(folder: str, device: str, **changes: Any) -> Any:
    from inference.engine.transformers import TransformersEngine
    from tests.engine.rig import Rig, tiny_config

    engine = TransformersEngine(folder, alias="tiny", device=device, config=tiny_config(**changes))
    return await Rig(engine).load()


def run(check: Check, names: list[str]) -> int:
    """Run the named checks, print a line for each; the number that failed."""
    failed = 0
    for name in names:
        started = time.monotonic()
        try:
            word, detail = "ok", CHECKS[name](check)
        except Skipped as reason:
            word, detail = "skipped", str(reason)
        except Exception as error:  # noqa: BLE001 - one failed check must not hide the others
            word, detail, failed = "FAILED", f"{type(error).__name__}: {error}", failed + 1
        print(f"{name:<10} {word:<8} {time.monotonic() - started:6.1f} s  {detail}", flush=True)
    return failed


def _default_model() -> str | None:
    from inference.errors import SluiceError
    from inference.models.registry import resolve_default

    try:
        return resolve_default()
    except SluiceError:
        return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder of the bench table; default: the fetched one")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), help="these checks alone")
    parser.add_argument("--kills", type=int, default=KILLS)
    options = parser.parse_args(arguments)
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: skipped: torch finds no CUDA device here")
        return 0
    from tests.engine.rig import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_model(Path(folder))
        check = Check(options.device, tiny, options.model or _default_model(), kills=options.kills)
        failed = run(check, options.only or list(CHECKS))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
