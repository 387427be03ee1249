"""One model over several processes (``cuda:0+cuda:1``), here on two CPU processes with gloo."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from inference.config import ModelSpec
from inference.engine.transformers import TransformersEngine
from inference.errors import ConfigError, EngineDied, ModelUnavailable
from inference.pool import check_present, check_sharing, parse_devices
from inference.pool.devices import environment
from tests.engine.rig import DEVICE, Rig, job, tiny_config
from tests.engine.test_transformers_engine import random_params
from tests.support import eventually

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(DEVICE != "cpu", reason="two CPU processes are meant")]

TWO = "cpu+cpu"


@pytest.fixture
async def rigs(tiny_folder: str) -> AsyncIterator[tuple[Rig, Rig]]:
    """The same model in one process, and in two."""
    made = [
        Rig(TransformersEngine(tiny_folder, alias="tiny", device=device, config=tiny_config(prefill_budget=64)))
        for device in ("cpu", TWO)
    ]
    try:
        for rig in made:
            await rig.load()
        yield made[0], made[1]
    finally:  # also of one that loads where the next does not: its loop would keep the test run from ending
        for rig in made:
            await rig.engine.close()


def followers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "inference.engine.follower" in " ".join(p.cmdline())]


async def test_two_processes_answer_as_one(rigs: tuple[Rig, Rig]) -> None:
    """Mixed parameters, prompts longer than a step, penalties and seeds: the sampler's choice holds everywhere."""
    choose = random.Random(11)
    jobs = [job(f"j{n}", [97 + n % 5] * choose.choice([1, 50, 400]), **random_params(choose)) for n in range(40)]
    alone, shared = rigs
    assert len(followers()) == 1
    expected = await alone.run_all(jobs)
    for one, other in zip(expected, await shared.run_all(jobs), strict=True):
        assert one.ids == other.ids and one.finish == other.finish
    await shared.quiet()
    assert shared.info.capacity_tokens == alone.info.capacity_tokens


async def test_aborts_and_arrivals_at_any_moment_keep_the_processes_together(rigs: tuple[Rig, Rig]) -> None:
    _, rig = rigs
    choose = random.Random(2)
    for n in range(60):
        name = f"a{n}"
        each = job(name, [65 + n % 3] * choose.choice([1, 40, 700]), max_tokens=200, ignore_eos=True)
        await eventually(lambda each=each: rig.engine.fits(each), 20, every=0.001)
        answer = rig.submit(each)
        if choose.random() < 0.3:
            await answer.tokens(choose.randint(1, 5))
        if choose.random() < 0.8:
            rig.engine.abort(name)
        elif choose.random() < 0.5:
            await asyncio.sleep(choose.random() * 0.01)
    for answer in list(rig.answers.values()):
        if answer.finish is None:
            rig.engine.abort(next(k for k, v in rig.answers.items() if v is answer))
    await rig.quiet()
    assert len((await rig.run(job("last", max_tokens=30, ignore_eos=True))).ids) == 30


async def test_prefixes_are_shared_in_every_process_alike(rigs: tuple[Rig, Rig]) -> None:
    _, rig = rigs
    prompt = [97 + n % 7 for n in range(600)]
    first = await rig.run(job("first", prompt, max_tokens=4))
    again = await rig.run(job("again", prompt, max_tokens=4))
    assert first.ids == again.ids
    assert again.outputs[0].cached >= 512


# The library's thread stumbles over the lost connection a second time, while it tells the others.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_end_of_one_process_ends_the_engine(tiny_folder: str) -> None:
    rig = await Rig(TransformersEngine(tiny_folder, alias="tiny", device=TWO, config=tiny_config())).load()
    answer = rig.submit(job("a", max_tokens=1500, ignore_eos=True))
    await answer.tokens(3)
    (other,) = followers()
    other.send_signal(signal.SIGKILL)
    error = await asyncio.wait_for(rig.death, 5.0)
    assert isinstance(error, EngineDied)
    with pytest.raises(EngineDied):
        rig.submit(job("b"))
    await rig.engine.close()


async def test_closing_leaves_no_process_and_no_variables(tiny_folder: str) -> None:
    for _ in range(2):  # a second engine may form a group of its own
        rig = await Rig(TransformersEngine(tiny_folder, alias="tiny", device=TWO, config=tiny_config())).load()
        await rig.run(job("a", max_tokens=3))
        await rig.engine.close()
        assert followers() == []
        assert "WORLD_SIZE" not in os.environ


async def test_a_model_that_cannot_be_divided_is_refused(tiny_folder: str) -> None:
    engine = TransformersEngine(tiny_folder, alias="tiny", device="cpu+cpu+cpu", config=tiny_config())
    with pytest.raises(ModelUnavailable, match=f"{Path(tiny_folder).name}: its 2 key-value heads"):
        await Rig(engine).load()
    assert followers() == []


def test_devices_of_one_worker() -> None:
    assert parse_devices("cuda:0+cuda:1,cuda:2+cuda:3") == ["cuda:0+cuda:1", "cuda:2+cuda:3"]
    assert environment(TWO) == {"CUDA_VISIBLE_DEVICES": "", "SLUICE_WORKER_DEVICE": TWO}
    for wrong in ("cuda:0+cpu", "cuda:1+cuda:1", "cpu+cuda:0"):
        with pytest.raises(ConfigError, match="--devices"):
            parse_devices(wrong)


def test_only_one_transformers_model_is_spread_over_devices() -> None:
    one, two = ModelSpec("small", "transformers", "x"), ModelSpec("big", "transformers", "y")
    check_sharing(["cuda:0+cuda:1"], [one])
    check_sharing(["cuda:0", "cuda:1"], [one, two])
    for specs in ([one, two], [ModelSpec("minilm", "embed", "z")]):
        with pytest.raises(ConfigError, match=r"cuda:0\+cuda:1.*--models"):
            check_sharing(["cuda:0+cuda:1"], specs)


def test_devices_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, upstream = ModelSpec("small", "transformers", "x"), ModelSpec("big", "openai", "http://h/v1#m")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: two'\n")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check_present(["cpu", "cuda:0+cuda:1"], [model])
    check_present(["cuda:2"], [upstream])  # it computes on none
    with pytest.raises(ConfigError, match="no cuda:2 here; nvidia-smi shows 2 CUDA devices"):
        check_present(["cuda:0+cuda:2"], [upstream, model])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no cuda:0 here; CUDA_VISIBLE_DEVICES shows no CUDA device"):
        check_present(["cuda:0"], [model])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    check_present(["cuda:2"], [model])  # nobody knows: a worker will see
