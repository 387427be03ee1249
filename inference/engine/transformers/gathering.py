"""Requests that reach an idle engine together begin together.

The batching loop begins with the first that it sees. The others of a burst would then join it a few at
a time, beside answers that are streaming already and under the pace that protects those: the same work in
smaller steps, and the last of them ends as many steps later. On CPUs that is a tenth of the throughput of
eight short answers. So the first waits for company, for a moment that nobody notices beside its prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inference.engine.transformers.generation import Generation

QUIET = 1 / 40
"""Part of a usual step without another arrival after which a burst is taken to be over."""
LONGEST = 1 / 4
"""Part of a usual step that the first of a burst waits at most."""


class Gathering:
    """Holds what arrives while nothing runs. Used in the event loop's thread alone.

    Args:
        depart: starts what has gathered, in the order of arrival.
        step: seconds of a usual step.
    """

    def __init__(self, depart: Callable[[list[Generation]], None], step: Callable[[], float]) -> None:
        self._depart = depart
        self._step = step
        self._waiting: list[Generation] = []
        self._latest = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """Whether somebody waits, whom the next may join."""
        return bool(self._waiting)

    def add(self, generation: Generation) -> None:
        """Let it wait for others, or with them."""
        loop = asyncio.get_running_loop()
        now, step = loop.time(), self._step()
        if not self._waiting:
            self._latest = now + LONGEST * step
        self._waiting.append(generation)
        if self._timer is not None:
            if self._timer.when() <= now:
                return  # it is about to run
            self._timer.cancel()
        self._timer = loop.call_at(min(now + QUIET * step, self._latest), self._leave)

    def stop(self) -> None:
        """Start nothing any more."""
        self._waiting = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self) -> None:
        waiting, self._waiting, self._timer = self._waiting, [], None
        self._depart(waiting)
