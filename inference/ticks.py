"""Loops of one process that wake together.

A process has half a dozen loops with a period of a second: heartbeats, the
reaper, checks. Each on a timer of its own wakes an idle process as often, and
each asks Redis by itself. Woken at the same moment they cost one wake-up, and
what they ask goes in one round trip.
"""

from __future__ import annotations

import asyncio
import math
import random

_PHASE = random.random() * 60.0
"""Seconds. Every process has its own, so that a restart of many does not make them all ask at one moment."""
_EARLY = 0.1
"""A timer may fire a little before its time: up to this part of a period before a tick counts as that tick."""


def until_tick(interval: float) -> float:
    """Seconds to the next tick of all loops with this ``interval`` (seconds), or with a divisor of it.

    Between 0.1 and 1.1 of ``interval``.
    """
    now = asyncio.get_running_loop().time()
    passed = math.floor((now - _PHASE) / interval + _EARLY)
    return _PHASE + (passed + 1) * interval - now


async def next_tick(interval: float) -> None:
    """Sleep until the next tick."""
    await asyncio.sleep(until_tick(interval))
