"""Sends a worker's frames: one round trip per engine step, nothing lost while Redis is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from inference.errors import StoreUnavailable
from inference.messages import Step, StepFrame, encode
from inference.store.store import Append, RequestStore
from inference.worker.sequence import raw

logger = logging.getLogger("sluice.worker")


class Outbox:
    """Collects frames and appends them in order.

    While one append is under way, the frames of later steps gather and go
    together in the next. An append that got no answer is sent again: the script
    takes each frame once. ``on_odd(frame, word, server)`` hears of frames
    that were refused (``stale``: the request is another's; ``gap``: its log has
    lost its end), of readers elsewhere (``moved``) and of finished requests
    that nobody reads (``detached``). ``on_failure`` hears of the end of the
    task: a worker whose frames go nowhere must not live on.
    """

    def __init__(
        self,
        store: RequestStore,
        worker: str,
        on_odd: Callable[[Append, str, str], None],
        on_failure: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._store = store
        self._on_failure = on_failure
        self._sending: list[Append] = []
        self._worker = worker
        self._on_odd = on_odd
        self._pending: list[Append] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="outbox")
            self._task.add_done_callback(self._on_failure)

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def put(self, frames: list[Append]) -> None:
        """Queue the frames of one step."""
        if frames:
            self._pending += frames
            self._idle.clear()
            self._wake.set()

    async def wait_flushed(self) -> None:
        """Until everything put so far is in Redis."""
        await self._idle.wait()

    def ids(self) -> set[str]:
        """Requests with frames that are not yet known to be in Redis."""
        return {f.id for f in (*self._pending, *self._sending)}

    def drop(self, request_id: str) -> None:
        """Forget what is queued for a request that has been settled."""
        self._pending = [f for f in self._pending if f.id != request_id]

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            frames, self._pending = self._pending, []
            if frames:
                self._sending = frames
                await self._send(frames)
                self._sending = []
            if not self._pending:
                self._idle.set()

    async def _send(self, frames: list[Append]) -> None:
        backoff = 0.05
        while True:
            try:
                odd = await self._store.append(self._worker, frames, self._payloads(frames))
                break
            except StoreUnavailable:
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, 1.0)
        if odd:
            await self._odd(frames, odd)

    def _payloads(self, frames: list[Append]) -> list[tuple[str, bytes]]:
        by_server: dict[str, list[StepFrame]] = {}
        for f in frames:
            if f.server:
                by_server.setdefault(f.server, []).append(StepFrame(f.id, f.attempt, raw(f.frame)))
        return [(server, encode(Step(self._worker, parts))) for server, parts in by_server.items()]

    async def _odd(self, frames: list[Append], odd: list[tuple[int, str, str]]) -> None:
        stale = {index for index, word, _ in odd if word in ("stale", "gap")}
        held_back = {frames[i].server for i in stale}
        again = [f for i, f in enumerate(frames) if f.server in held_back and i not in stale]
        for server, payload in self._payloads(again):
            try:
                await self._store.publish_to_server(server, payload)
            except StoreUnavailable:
                break  # the frames are in the log, where their readers look for them
        for index, word, server in odd:
            self._on_odd(frames[index], word, server)
