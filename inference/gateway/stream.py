"""One reader's view of one request: frames in order, from the fast path or from the log."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from inference.errors import SluiceError, StoreUnavailable
from inference.gateway.bell import Bell
from inference.gateway.ended import Detached, RequestEnded
from inference.lifecycle import Outcome, Reason, State
from inference.messages import Frame, Job, decode_frame

_LOG_PAGE = 256
_RETRY_AFTER = 0.25
"""Seconds after which a log that could not be read is read again."""


class RequestStream:
    """Frames of one request, in order, each exactly once.

    Attributes:
        id: the request's id.
        phase: ``queued`` or ``running``.
        attempt: how often a worker has claimed it.
        outcome: what leaving the context will settle; set it to override what
            the stream concludes from its last frame.
    """

    def __init__(
        self,
        request_id: str,
        job: Job | None,
        *,
        read_log: Callable[[str, int, int], Awaitable[Sequence[bytes]]],
        buffer: int,
        after: int = 0,
        attached: bool = False,
        resumable: bool = False,
        reader: str = "",
    ) -> None:
        self.id = request_id
        self.job = job
        self.resumable = resumable
        self.reader = reader
        self.phase = "queued"
        self.attempt = 0
        self.outcome: Outcome | None = None
        self.created_ms = 0
        """When it was accepted, by the Redis clock; 0 before."""
        self.tokens = 0
        self.cached = 0
        """Prompt tokens that the engine found in its prefix cache."""
        self.gaps = array("d")
        """Seconds between consecutive tokens as they arrived here: one fewer than tokens."""
        self._last_token = 0.0
        self.began = time.monotonic()
        self.first_token = 0.0
        """``time.monotonic()`` of the first token that shows (where none does, of the last one), 0 before."""
        self._waiting_since = 0.0
        """``time.monotonic()`` since when something waits for the reader or its client; 0 where nothing does."""
        self.finish: str | None = None
        self.admitted = False
        """Whether the store is known to hold it; only then does the periodic check judge it."""
        self.closing: SluiceError | None = None
        """Raised once everything logged was delivered (a retained request that ended early)."""
        self.position: Callable[[], Awaitable[int | None]] | None = None
        self._read_log = read_log
        self._buffer = buffer
        self._frames: deque[Frame] = deque()
        self._received = after
        self._behind = attached
        self._attached = attached
        self._turn = 0
        self._overtaken = 0
        """The latest turn of which is known that it has come; see :meth:`overtaken`."""
        self._ended: SluiceError | None = None
        self._ping = False
        self._bell = Bell()
        self._group: Bell | None = None
        self._retry: asyncio.TimerHandle | None = None

    # -- called by the hub; never blocks ---------------------------------------------------------

    def feed(self, attempt: int, raw: Any, now: float = 0.0) -> None:
        """Take one encoded frame of the fast path, which came at ``now`` (``time.monotonic()``; 0: this moment)."""
        now = now or time.monotonic()
        if attempt < self.attempt:
            return
        frame = decode_frame(raw)
        if frame.seq <= self._received:
            return
        if frame.seq == self._received + 1 and not self._behind and len(self._frames) < self._buffer:
            self._take(frame, now)
        else:
            # A gap, or a reader too slow to keep up: what is missing stays in the log.
            self._behind = True
            self._waiting_since = self._waiting_since or now
        self._notify()

    def claimed(self, attempt: int) -> None:
        self.phase = "running"
        self.attempt = max(self.attempt, attempt)

    def logged(self, length: int) -> None:
        """Learn from the periodic check how long the log is: covers a lost message."""
        if length > self._received and not self._frames:
            self._behind = True
            self._notify()

    def clamp(self, length: int) -> None:
        """A reader that claims to have seen more than was ever logged reads on from the log's end."""
        if self._received > length:
            self._received = length
            self._behind = True

    def resync(self) -> None:
        """The fast path was interrupted: read on from the log."""
        if self.admitted and self.finish is None:
            self._behind = True
            self._notify()

    def end(self, error: SluiceError) -> None:
        """Somebody else settled it, or the reader was replaced. The first one counts."""
        if self._ended is None:
            self._ended = error
            self._notify()

    def overtaken(self, turn: int) -> None:
        """Another reader has taken the stream over, as its ``turn``-th. Older news than this reader is none."""
        self._overtaken = max(self._overtaken, turn)
        if self.admitted and self._overtaken > self._turn:
            self.end(Detached("Another reader has taken over this stream.", superseded=True))

    def admit(self, turn: int = 0) -> None:
        """The store holds the request for this reader, its ``turn``-th (0: the one that submitted it)."""
        self._turn = turn
        self.admitted = True
        self.overtaken(turn)

    def ping(self) -> None:
        """Ask the reader for a sign of life, unless it has something to say anyway."""
        if not self._frames:
            self._ping = True
            self._notify()

    # -- called by the reader --------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Sequence number of the last frame taken from the log or the fast path."""
        return self._received

    @property
    def complete(self) -> bool:
        """Whether the last frame has arrived, delivered or not."""
        return self.finish is not None or bool(self._frames and self._frames[-1].finish is not None)

    @property
    def ended(self) -> SluiceError | None:
        return self._ended

    def blocked_for(self, now: float) -> float:
        """Seconds by ``now`` (``time.monotonic()``) for which the reader has not come back for what waits; 0: nothing.

        A reader is away while it sends to its client, so one that stays away has a client that does not
        take what it is sent. The same goes for a reader that has the last frame and does not leave.
        """
        return now - self._waiting_since if self._waiting_since else 0.0

    def cancel(self, reason: Reason) -> None:
        """End the request from another task of this process; the reader gets :class:`RequestEnded`."""
        outcome = Outcome.cancelled(reason)
        if self.outcome is None:
            self.outcome = outcome
        self.end(RequestEnded(outcome))

    async def queue_position(self) -> int | None:
        """Place in the queue, 0 first; ``None`` where it is not waiting."""
        return None if self.position is None or self.phase != "queued" else await self.position()

    async def next(self) -> list[Frame]:
        """All frames available now, waiting for the first; ``[]`` asks for a ping.

        Raises:
            RequestEnded: settled by somebody else.
            Detached: the request goes on without this reader.
        """
        while True:
            ready = self.at_hand()
            if ready is None and not self.quiet:
                ready = await self.ready()
            if ready is not None:
                return ready
            self._waiting_since = 0.0
            self._bell.silence()
            await self._bell.heard()

    # -- its parts, for a reader of several streams ----------------------------------------------

    def ring_with(self, bell: Bell) -> None:
        """From now on news rings ``bell``; the reader says when all of its streams are :meth:`delivered`."""
        self._group = bell

    def delivered(self) -> None:
        """The reader has the last frame of this stream and of all its fellows."""
        self._waiting_since = time.monotonic()

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to do but wait, apart from frames."""
        return not (self._behind or self._ping) and self._ended is None and self.closing is None

    def at_hand(self) -> list[Frame] | None:
        """The frames that have arrived and are not delivered yet; ``None`` without any. Raises as :meth:`next`."""
        if not self._frames:
            return None
        frames = list(self._frames)
        self._frames.clear()
        self._waiting_since = time.monotonic() if self._behind else 0.0
        self._ping = False
        return self._deliver(frames)

    async def ready(self) -> list[Frame] | None:
        """More of the log, the end, or ``[]`` for a ping; ``None`` where there is neither. Raises as :meth:`next`."""
        self._waiting_since = 0.0
        if not self._frames and self._behind and self._retry is None:
            await self._catch_up()
        frames = self.at_hand()
        if frames is not None:
            return frames
        if self._ended is not None:
            raise self._ended
        if self.closing is not None:
            raise self.closing
        if self._ping:
            self._ping = False
            return []
        return None

    # -- frames ----------------------------------------------------------------------------------

    def _deliver(self, frames: list[Frame]) -> list[Frame]:
        last = frames[-1]
        if last.finish is not None and ":" in last.finish:
            # The log's closing entry of a request that ended early (see settle.lua).
            state, _, reason = last.finish.partition(":")
            outcome = Outcome(State(state), Reason(reason))
            if len(frames) == 1:
                raise RequestEnded(outcome)
            self.end(RequestEnded(outcome))
            return frames[:-1]
        self.finish = last.finish
        if last.finish is not None and self._group is None:
            # In a group it waits for its fellows first.
            self._waiting_since = time.monotonic()
        return frames

    def _take(self, frame: Frame, now: float, *, logged: bool = False) -> None:
        if not self._frames:
            self._waiting_since = now
        self._frames.append(frame)
        self._received = frame.seq
        self.phase = "running"
        count = len(frame.ids)
        if not self.first_token and (frame.text or frame.finish) and (count or self.tokens):
            self.first_token = now
        if not count:
            return
        if self._attached and logged:
            # Another reader has had these, and measured them.
            now = 0.0
        elif count == 1 and self._last_token:
            self.gaps.append(now - self._last_token)
        elif self._last_token:
            self.gaps.extend([(now - self._last_token) / count] * count)
        else:
            if not self._attached:
                self.cached = frame.cached
            self.gaps.extend([0.0] * (count - 1))
        self._last_token = now
        self.tokens += count

    async def _catch_up(self) -> None:
        self._behind = False
        try:
            raw = await self._read_log(self.id, self._received, _LOG_PAGE)
        except StoreUnavailable:
            # An outage ends the stream only when it lasts (the hub decides that); until then, read again.
            self._behind = True
            self._retry = asyncio.get_running_loop().call_later(_RETRY_AFTER, self._try_again)
            return
        now = time.monotonic()
        for entry in raw:
            frame = decode_frame(entry)
            # The fast path may have delivered some of these while the log was being read.
            if frame.seq == self._received + 1:
                self._take(frame, now, logged=True)
        if len(raw) == _LOG_PAGE:
            self._behind = True

    def _try_again(self) -> None:
        self._retry = None
        self._notify()

    def _notify(self) -> None:
        bell = self._group
        (self._bell if bell is None else bell).ring()
