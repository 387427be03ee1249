"""What a server knows of its requests until their end has been told: every start and every end, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inference import metrics, tracing
from inference.endings import log_ending, lost_ending
from inference.errors import NotServing, Overloaded, StoreUnavailable, TooLarge, UnknownModel
from inference.gateway.stream import RequestStream
from inference.messages import Ending
from inference.store import RequestStore, Submission

_UNCONFIRMED = 1000
_REFUSALS: dict[type[BaseException], str] = {
    UnknownModel: "unknown_model",
    NotServing: "not_serving",
    TooLarge: "too_large",
    Overloaded: "overloaded",
    StoreUnavailable: "store_unavailable",
}


class Ledger:
    """``on_accepted`` sees each submission that was stored, ``on_ending`` each request that this server settled."""

    def __init__(
        self,
        store: RequestStore,
        server: str,
        *,
        on_accepted: Callable[[Submission], None] | None = None,
        on_ending: Callable[[Ending], None] | None = None,
    ) -> None:
        self._store = store
        self._server = server
        self._on_accepted = on_accepted or (lambda spec: None)
        self._on_ending = on_ending or (lambda ending: None)
        self._unconfirmed: dict[str, Submission] = {}
        """Submissions whose reply was lost: they count as started once they are seen to end."""
        self._traces: dict[str, tracing.RequestTrace] = {}
        """What the last log line and the spans of each request need."""
        self._loose: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait, for a second at most, for what is still being found out."""
        if self._loose:
            await asyncio.wait(self._loose, timeout=1.0)

    def refused(self, spec: Submission, error: BaseException) -> None:
        """Nothing was stored."""
        metrics.refused(spec.job.model, _REFUSALS.get(type(error), metrics.OTHER))

    def begin(self, spec: Submission) -> tuple[tracing.RequestTrace, Submission]:
        """A request is about to be stored; the submission that is returned carries its trace."""
        trace, spec = tracing.begin(spec)
        self._traces[spec.job.id] = trace
        return trace, spec

    def accepted(self, spec: Submission, submitted: asyncio.Future[tuple[int, int]]) -> None:
        """Redis has answered to a submission, or will not."""
        if submitted.cancelled():
            return
        error = submitted.exception()
        if error is None:
            self._on_accepted(spec)
            return
        self.refused(spec, error)
        if isinstance(error, StoreUnavailable):
            self._unconfirmed[spec.job.id] = spec
            if len(self._unconfirmed) > _UNCONFIRMED:
                del self._unconfirmed[next(iter(self._unconfirmed))]

    def left(self, stream: RequestStream, *, detached: bool) -> None:
        """Redis has answered to what a reader left behind. Where nothing was settled, find out why."""
        trace = self._traces.get(stream.id)
        self.forget(stream.id)
        if trace is not None and stream.admitted and not detached:
            task = asyncio.create_task(self._lost(stream, trace.spec), name=f"lost-{stream.id}")
            self._loose.add(task)
            task.add_done_callback(self._loose.discard)

    async def _lost(self, stream: RequestStream, spec: Submission) -> None:
        """It was stored, and it is gone although nobody has ended it: Redis lost it, so it ends here."""
        try:
            if await self._store.outcome(stream.id) is not None:
                return
        except StoreUnavailable:
            return
        self.ended(lost_ending(stream, spec, server=self._server, by=self._store.token))

    def forget(self, request_id: str) -> None:
        """Its end is, or will be, told by another process."""
        trace = self._traces.pop(request_id, None)
        if trace is not None:
            trace.end(None)

    def ended(self, ending: Ending) -> None:
        """This process has settled a request: count it, log its line, end its span."""
        unconfirmed = self._unconfirmed.pop(ending.id, None)
        if unconfirmed is not None:
            # It was stored after all.
            self._on_accepted(unconfirmed)
        trace = self._traces.pop(ending.id, None)
        if trace is not None:
            trace.end(ending)
        log_ending(ending, exchange="" if trace is None else trace.exchange)
        self._on_ending(ending)
