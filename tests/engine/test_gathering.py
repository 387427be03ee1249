"""What reaches an idle engine together begins together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from inference.engine.transformers import TransformersEngine, gathering
from inference.engine.transformers.gathering import LONGEST, QUIET, Gathering
from inference.engine.transformers.generation import Generation
from inference.engine.transformers.scheduler import Pace
from tests.engine.rig import DEVICE, Rig, job, tiny_config, write_tiny_model


def generation(name: str) -> Generation:
    return Generation(job(name), (), eos_ids=frozenset(), vocab_size=8)


class Departures:
    def __init__(self, step: float) -> None:
        self.groups: list[list[str]] = []
        self.left = asyncio.Event()
        self.gathering = Gathering(self._depart, lambda: step)

    def _depart(self, generations: list[Generation]) -> None:
        self.groups.append([g.job.id for g in generations])
        self.left.set()


async def test_a_burst_departs_once_and_in_order() -> None:
    seen = Departures(step=0.2 / QUIET)
    for name in "abc":
        seen.gathering.add(generation(name))
        await asyncio.sleep(0)
        assert seen.gathering.open
    async with asyncio.timeout(20):
        await seen.left.wait()
    assert seen.groups == [["a", "b", "c"]]
    assert not seen.gathering.open


async def test_nothing_is_waited_for_before_a_step_is_known() -> None:
    seen = Departures(step=0.0)
    seen.gathering.add(generation("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen.groups == [["a"]]


class Clock:
    """A loop whose time stands still, and the last timer that was set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due = 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Clock:
        self.due = when
        return self

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.due = 0.0


def test_arrivals_without_end_do_not_hold_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arrives within the quiet time of the one before; only the limit ends the wait."""
    clock = Clock()
    monkeypatch.setattr(gathering, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    seen = Gathering(lambda generations: None, lambda: 4.0)
    seen.add(generation("x"))
    assert clock.due == 100 + 4 * QUIET
    while clock.now < 100 + 4 * LONGEST:
        seen.add(generation("x"))
        assert clock.now < clock.due <= 100 + 4 * LONGEST
        clock.now += 4 * QUIET / 2
    assert clock.due == 100 + 4 * LONGEST


async def test_what_waits_at_the_end_is_not_started() -> None:
    seen = Departures(step=0.0)
    seen.gathering.add(generation("a"))
    seen.gathering.stop()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen.groups == []


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """An engine that takes its usual step for 40 s long: a burst is over after one without arrivals."""
    engine = TransformersEngine(write_tiny_model(tmp_path), alias="tiny", device=DEVICE, config=tiny_config())
    rig = await Rig(engine).load()
    monkeypatch.setattr(Pace, "_mean", lambda self, old, new: 1 / QUIET)
    assert (await rig.run(job("first", max_tokens=3, ignore_eos=True))).finish == "length"
    await rig.quiet()
    yield rig
    await engine.close()


async def test_a_burst_shares_its_first_step(rig: Rig) -> None:
    a = rig.submit(job("a", max_tokens=4, ignore_eos=True))
    # Time in which the loop would have begun with the first by itself; there is no event for what must not come.
    await asyncio.sleep(0.05)
    assert a.ids == []
    b = rig.submit(job("b", max_tokens=4, ignore_eos=True))
    await a.finished()
    await b.finished()
    assert a.steps == b.steps


async def test_one_that_is_cancelled_while_it_waits_is_never_started(rig: Rig) -> None:
    before = rig.engine.stats()
    a = rig.submit(job("a", max_tokens=4))
    b = rig.submit(job("b", max_tokens=4, ignore_eos=True))
    rig.engine.abort("a")
    assert rig.engine.free_slots() == before.slots - 1, "it is free at once: the loop has never seen it"
    await b.finished()
    assert a.outputs == []
    assert rig.engine.stats().prompt_tokens - before.prompt_tokens == len("hello")
    await rig.quiet()


async def test_a_closed_engine_starts_nothing_that_waits(rig: Rig) -> None:
    a = rig.submit(job("a", max_tokens=4))
    assert rig.engine._gathering.open
    closing = asyncio.create_task(rig.engine.close())
    await asyncio.sleep(0)
    assert not rig.engine._gathering.open, "its timer would run while the batching loop is being stopped"
    await closing
    assert a.outputs == []


async def test_one_that_the_library_does_not_take_fails_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither hangs, nor holds its slot, nor keeps the rest of its burst from starting."""
    manager = rig.engine._batching_loop.manager
    take = manager.add_request

    def refuse(prompt: list[int], **more: object) -> object:
        if more["request_id"].endswith(":bad"):
            raise RuntimeError("no")
        return take(prompt, **more)

    monkeypatch.setattr(manager, "add_request", refuse)
    bad, good = (rig.submit(job(name, max_tokens=3, ignore_eos=True)) for name in ("bad", "good"))
    assert (await bad.finished()).finish == "error"
    assert (await good.finished()).finish == "length"
    await rig.quiet()
    assert rig.engine.free_slots() == rig.info.slots


async def test_beside_running_ones_nothing_waits(rig: Rig) -> None:
    """The wait is for an idle engine: a busy one lets a newcomer join at its next step."""
    running = rig.submit(job("running", max_tokens=400, ignore_eos=True))
    await running.tokens(1)
    late = rig.submit(job("late", max_tokens=1, ignore_eos=True))
    await late.finished()
    assert running.finish is None, "it has waited for the other to end"
