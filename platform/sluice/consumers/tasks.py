"""Cancelling tasks so that their clean-up is left in peace, and waiting for its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any
from weakref import WeakSet

logger = logging.getLogger("sluice.tasks")

#: No clean-up of ours takes so long, seconds: whoever still runs then has lost its cancellation.
PATIENCE = 10.0

_asked: WeakSet[asyncio.Task[Any]] = WeakSet()


def cancel_once(task: asyncio.Task[Any]) -> bool:
    """Ask a task to stop, unless it has been asked already.

    A second cancellation would hit the first ``await`` of the clean-up that the
    first one started, and cut that off. Returns whether the task still runs.
    """
    if task.done():
        return False
    if task not in _asked:
        _asked.add(task)
        task.cancel()
    return True


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Ask tasks to stop and wait for the end of each, even while being cancelled oneself, any number of times."""
    for task in tasks:
        cancel_once(task)
    cancelled = False
    while running := {task for task in tasks if not task.done()}:
        try:
            _, late = await asyncio.wait(running, timeout=PATIENCE)
            for task in late:
                logger.warning("%s still cleans up after %g s; asking again", task.get_name(), PATIENCE)
                task.cancel()
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # seen; whoever needs it asks the task
    if cancelled:
        raise asyncio.CancelledError
