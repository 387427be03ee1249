"""What it means for a request that its reader leaves: which end it has, or that it goes on without."""

from __future__ import annotations

import asyncio
from typing import Any

from inference.config import Config
from inference.errors import Refused, StoreUnavailable
from inference.gateway.ended import Detached, RequestEnded
from inference.gateway.ledger import Ledger
from inference.gateway.settler import Settler
from inference.gateway.stream import RequestStream
from inference.lifecycle import Outcome, Reason
from inference.redisio import Commander
from inference.store import RequestStore

_SETTLE_WAIT = 2.0
"""Seconds for which a finished answer waits for Redis before its body ends all the same."""


class Leaving:
    """The way out of a stream's block; it always leaves a note with the settler, or the stream to a newer reader."""

    def __init__(self, store: RequestStore, redis: Commander, settler: Settler, ledger: Ledger, config: Config) -> None:
        self._store = store
        self._redis = redis
        self._settler = settler
        self._ledger = ledger
        self._config = config

    async def leave(
        self, stream: RequestStream, failure: BaseException | None, submitted: asyncio.Future[Any] | None
    ) -> None:
        """The block has been left by ``failure`` (``None``: at its end); ``submitted`` is its submit, if it made one.

        Waits until Redis has settled the request, for a short time at most, unless the task is being cancelled.
        """
        after = None if submitted is None or submitted.done() else submitted
        gone = isinstance(failure, (asyncio.CancelledError, GeneratorExit))
        # As the stream knows it: on its way here the exception may have become another.
        ended = failure if isinstance(failure, RequestEnded) else stream.ended
        if failure is not None and isinstance(ended, RequestEnded) and stream.outcome is None:
            # Somebody else settled it, or its state is gone; the guard makes this harmless.
            stream.outcome = ended.outcome
            self._store.doubt(stream.id)
        grace = None
        if isinstance(failure, Detached) or (isinstance(stream.ended, Detached) and failure is not None):
            if stream.ended is not None and getattr(stream.ended, "superseded", False):
                self._ledger.forget(stream.id)
                return
            grace = self._config.resume_grace
        elif (gone or isinstance(failure, StoreUnavailable)) and _resumes(stream):
            grace = self._config.resume_grace
        outcome = _outcome(stream, failure)
        note = self._settler.put(stream.id, outcome, grace=grace, reader=stream.reader, after=after)
        note.add_done_callback(lambda _: self._ledger.left(stream, detached=grace is not None))
        if not gone:
            # After an outage that was too long already, nothing is gained by waiting once more.
            away = self._redis.outage() > self._config.redis_outage_limit
            await asyncio.wait([note], timeout=0.0 if away else _SETTLE_WAIT)


def _resumes(stream: RequestStream) -> bool:
    """Whether the request may go on without this reader."""
    return stream.resumable and stream.finish is None and stream.outcome is None


def _outcome(stream: RequestStream, failure: BaseException | None) -> Outcome:
    if stream.outcome is not None:
        return stream.outcome
    if stream.finish in ("stop", "length"):
        return Outcome.finished(stream.finish)
    if stream.finish is not None:
        return Outcome.failed(Reason.ENGINE_ERROR)
    # Refused was not this one but another of the same call, which needs all of them.
    if failure is None or isinstance(failure, (asyncio.CancelledError, GeneratorExit, OSError, Refused)):
        return Outcome.cancelled(Reason.CLIENT_GONE)
    if isinstance(failure, StoreUnavailable):
        return Outcome.failed(Reason.STATE_LOST)
    return Outcome.failed(Reason.ENGINE_ERROR)
