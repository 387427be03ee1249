"""Several streams of one reader."""

from __future__ import annotations

from collections.abc import Sequence

from inference.gateway.bell import Bell
from inference.gateway.ended import RequestEnded
from inference.gateway.stream import RequestStream
from inference.messages import Frame


class StreamGroup:
    """Several streams read as one, for requests with more than one choice."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = list(streams)
        self._bell = Bell()
        self._open = dict(enumerate(self.streams))
        if len(self.streams) > 1:
            for stream in self.streams:
                stream.ring_with(self._bell)

    async def next(self) -> list[tuple[int, list[Frame]]]:
        """(index, frames) of every stream that has some; ``[]`` asks for a ping.

        A stream leaves the group with its last frame. Raises as
        :meth:`RequestStream.next`, for the first stream that fails. What has ended one
        ends the others too, as their reader needs all of them.
        """
        try:
            return await self._next()
        except RequestEnded as exc:
            for stream in self._open.values():
                if stream.ended is None and stream.outcome is None:
                    stream.outcome = exc.outcome
            raise

    async def _next(self) -> list[tuple[int, list[Frame]]]:
        if len(self.streams) == 1 and self._open:
            only = await self.streams[0].next()
            if only and only[-1].finish is not None:
                self._open.clear()
            return [(0, only)] if only else []
        while True:
            self._bell.silence()
            ready: list[tuple[int, list[Frame]]] = []
            ping = False
            for index, stream in list(self._open.items()):
                frames = stream.at_hand()
                if frames is None and not stream.quiet:
                    frames = await stream.ready()
                if frames:
                    ready.append((index, frames))
                    if frames[-1].finish is not None:
                        del self._open[index]
                elif frames is not None:
                    ping = True
            if not self._open:
                for stream in self.streams:
                    stream.delivered()
            if ready or ping or not self._open:
                return ready
            await self._bell.heard()

    @property
    def done(self) -> bool:
        """Whether every stream has delivered its last frame."""
        return not self._open
