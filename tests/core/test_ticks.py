"""Loops of one process wake together, however they began."""

from __future__ import annotations

import asyncio

import pytest

from inference import ticks
from inference.ticks import until_tick

PHASE = 7.3
"""Seconds; ticks of a one-second interval fall on x.3."""


@pytest.fixture
async def at(monkeypatch):
    """Asks for the wait at a moment of the loop's clock."""
    monkeypatch.setattr(ticks, "_PHASE", PHASE)
    loop = asyncio.get_running_loop()

    def ask(now: float, interval: float) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: now)
            return until_tick(interval)

    return ask


@pytest.mark.parametrize("now", [100.0, 100.1, 100.19, 99.4])
async def test_loops_that_begin_at_different_times_meet(at, now):
    """Sleeping for the interval from wherever they began, they would stay apart for ever."""
    assert now + at(now, 1.0) == pytest.approx(100.3)


async def test_a_loop_with_a_divisor_of_the_interval_wakes_with_the_others(at):
    assert 100.0 + at(100.0, 0.25) == pytest.approx(100.05)
    assert 100.3 in [pytest.approx(100.05 + n * 0.25) for n in range(4)]


@pytest.mark.parametrize("early", [0.0, 1e-9, 0.001, 0.09])
async def test_a_timer_that_fires_a_little_early_is_not_run_twice(at, early):
    """Without the allowance the loop would turn again at once, with a wait of ``early``."""
    assert at(100.3 - early, 1.0) == pytest.approx(1.0 + early)


async def test_a_round_that_takes_long_does_not_shorten_the_next_to_nothing(at):
    """Ninety-five hundredths of the interval gone: the tick after the next one, not a twentieth later."""
    assert at(100.3 + 0.95, 1.0) == pytest.approx(1.05)
    assert at(100.3 + 0.85, 1.0) == pytest.approx(0.15)


async def test_no_wait_is_longer_than_a_tenth_over_the_interval(at):
    """What a heartbeat's lifetime has to cover."""
    waits = [at(50.0 + n / 977, 1.0) for n in range(2000)]
    assert min(waits) > 0.09
    assert max(waits) < 1.11
