"""The settler: ends requests from a task of its own, and does not give up.

The task that served a client is the one that is being killed when its request
has to be ended. So it only leaves a note here; this task repeats the script
until Redis has answered. A server does not exit while notes are left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from inference import metrics
from inference.background import Background
from inference.errors import StoreUnavailable
from inference.lifecycle import Outcome
from inference.messages import Ending
from inference.store.store import RequestStore

logger = logging.getLogger("sluice.settler")

_FIRST_BACKOFF = 0.05
_LAST_BACKOFF = 1.0


class _Note:
    __slots__ = ("after", "done", "grace", "outcome", "reader", "tries")

    def __init__(
        self,
        outcome: Outcome,
        grace: float | None,
        reader: str | None,
        after: asyncio.Future[tuple[int, int]] | None,
    ) -> None:
        self.outcome = outcome
        self.reader = reader
        self.grace = grace
        self.after = after
        self.tries = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Settler:
    """Settles (or detaches) requests of one server; see the module's text."""

    def __init__(self, store: RequestStore, server: str, on_ending: Callable[[Ending], None]) -> None:
        self._store = store
        self._server = server
        self._on_ending = on_ending
        self._notes: dict[str, _Note] = {}
        self._busy: set[str] = set()
        self._wake = asyncio.Event()
        self._task = Background("settler", self._run)
        self._jobs: set[asyncio.Task[None]] = set()
        self.retries = 0

    def start(self) -> None:
        self._task.start()

    def put(
        self,
        request_id: str,
        outcome: Outcome,
        *,
        grace: float | None = None,
        reader: str | None = None,
        after: asyncio.Future[tuple[int, int]] | None = None,
    ) -> asyncio.Future[None]:
        """Leave a note; the future is done when Redis has answered.

        ``grace`` asks to detach the request for so many seconds instead of
        ending it, unless ``reader`` (``None``: whoever reads it) has been followed
        by another. ``after`` is a submit under way whose reply must come first.
        """
        note = self._notes.get(request_id)
        if note is None:
            note = self._notes[request_id] = _Note(outcome, grace, reader, after)
            self._wake.set()
        elif note.reader != reader:
            # Another one has taken over and left since the first did: how the last one left is what counts.
            note.outcome, note.grace, note.reader = outcome, grace, reader
        return note.done

    def knows(self, request_id: str) -> bool:
        """Whether a note about the request is waiting."""
        return request_id in self._notes

    @property
    def pending(self) -> int:
        """Requests that Redis has not yet been told about."""
        return len(self._notes)

    async def wait_empty(self) -> None:
        """Until every note has been dealt with."""
        while self._notes:
            await asyncio.wait([n.done for n in self._notes.values()])

    async def stop(self, timeout: float) -> int:
        """Wait for the notes up to ``timeout`` seconds, then stop. Gives how many are left."""
        try:
            async with asyncio.timeout(timeout):
                await self.wait_empty()
        except TimeoutError:
            logger.error(
                "stopping with %d requests unsettled; a reaper elsewhere ends them",
                self.pending,
                extra={"event": "settler_gave_up"},
            )
        await self._task.stop()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        return self.pending

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for request_id in self._notes.keys() - self._busy:
                self._busy.add(request_id)
                job = asyncio.create_task(self._settle(request_id), name=f"settle-{request_id}")
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)

    async def _settle(self, request_id: str) -> None:
        note = self._notes[request_id]
        if note.after is not None:
            # Whether it was accepted decides nothing here: settling what was never stored does nothing.
            await asyncio.wait([note.after])
        backoff = _FIRST_BACKOFF
        while True:
            told = note.reader
            try:
                await self._once(request_id, note)
                if note.reader == told:
                    break  # otherwise another one has left while Redis was being told of the one before
            except StoreUnavailable:
                self.retries += 1
                metrics.SETTLE_RETRIES.inc()
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, _LAST_BACKOFF)
            except Exception:
                # The edge of this task: a note that stays would keep the server from its end.
                logger.exception("request %s could not be settled", request_id, extra={"event": "settle_failed"})
                break
        del self._notes[request_id]
        self._busy.discard(request_id)
        note.done.set_result(None)

    async def _once(self, request_id: str, note: _Note) -> None:
        outcome = note.outcome
        if note.grace is not None:
            word, finish = await self._store.detach(
                request_id, server=self._server, grace=note.grace, reader=note.reader
            )
            if word in ("detached", "gone"):
                return
            if word == "finished" and finish in ("stop", "length"):
                outcome = Outcome.finished(finish)
        ending = await self._store.settle(request_id, outcome, server=self._server, guard=("server", self._server))
        if ending is not None:
            self._on_ending(ending)
