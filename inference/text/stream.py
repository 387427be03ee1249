"""The text of one request, as its worker builds it from the engine's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from inference.text.detokenizer import Detokenizer
from inference.text.protocol import TokenBytes
from inference.text.stops import StopMatcher


class TextDelta(msgspec.Struct, frozen=True):
    """What one push gave.

    Attributes:
        text: text that is certain now and was not returned before.
        finished_by: the stop string that ended the answer; nothing may be pushed
            after it, and the engine's sequence is to be aborted.
        used: how many of the pushed ids belong to the answer (fewer than were
            pushed only where a stop string ended it in the middle of a step).
    """

    text: str
    finished_by: str | None = None
    used: int = 0


class TextStream:
    """Detokenisation and stop strings of one request.

    Stop strings are looked for only in text made by tokens after the first
    ``min_tokens``; a string that begins before does not count, as that text has
    been shown already.

    A continuation on another worker passes what the token log holds as ``ids`` and
    ``text``. Replaying the ids rebuilds the state, held-back text included, so that
    the next push returns what an undisturbed run would have returned. Text once
    sent stands: should the replay disagree with ``text`` (another tokenizer), only
    what the replay has beyond it is emitted.

    Args:
        tokenizer: ``None`` for engines that give text themselves; ids are then only counted.
        continues: see :class:`inference.text.detokenizer.Detokenizer`.
    """

    __slots__ = ("_backlog", "_count", "_detokenizer", "_matcher", "_min_tokens", "_stopped")

    def __init__(
        self,
        tokenizer: TokenBytes | None,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        ids: Sequence[int] = (),
        text: str = "",
        continues: bool = False,
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continues=continues)
        self._matcher = StopMatcher(stops) if any(stops) else None
        self._min_tokens = min_tokens
        self._count = 0
        self._backlog = ""
        self._stopped: str | None = None
        if ids or text:
            self._replay(ids, text)

    @property
    def count(self) -> int:
        """Tokens of the answer so far, resumed ones included."""
        return self._count

    @property
    def stopped(self) -> str | None:
        """The stop string that has ended the answer; also set where the replayed ids hold one."""
        return self._stopped

    def push(self, ids: Sequence[int], hidden: int = 0, text: str | None = None) -> TextDelta:
        """Take one output of the engine.

        Args:
            ids: the new token ids.
            hidden: how many of the last ``ids`` are not to be shown.
            text: the engine's own text for these ids, instead of detokenising.
        """
        if self._stopped is not None:
            return TextDelta(self._take_backlog(), self._stopped, 0)
        shown = len(ids) - hidden
        if text is not None:
            delta = self._push_text(text, len(ids))
        elif self._matcher is None:
            self._count += len(ids)
            delta = TextDelta(self._decode(ids if not hidden else ids[:shown]), None, len(ids))
        else:
            delta = self._push_each(ids, shown)
        if self._backlog:
            return TextDelta(self._take_backlog() + delta.text, delta.finished_by, delta.used)
        return delta

    def finish(self, reason: str = "stop") -> str:
        """End the answer; return the text that was held back.

        A near miss of a stop string comes out in full. A character that is not
        complete becomes U+FFFD as in a whole decode, but where something else than the
        model ended the answer (``length``, ``error``) it is left out: nobody meant it.
        """
        tail = self._take_backlog()
        if self._stopped is not None:
            return tail
        if self._detokenizer is not None:
            last = self._detokenizer.flush()
            if last and reason == "stop":
                if self._matcher is None:
                    return tail + last
                emit, self._stopped = self._matcher.push(last)
                tail += emit
        return tail if self._matcher is None else tail + self._matcher.flush()

    def _decode(self, ids: Iterable[int]) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push(ids)

    def _push_each(self, ids: Sequence[int], shown: int) -> TextDelta:
        """One token after another, so that a match knows the token that completed it."""
        assert self._matcher is not None
        parts: list[str] = []
        for place, token in enumerate(ids):
            self._count += 1
            piece = self._decode((token,)) if place < shown else ""
            if self._count <= self._min_tokens:
                parts.append(piece)
                continue
            emit, stop = self._matcher.push(piece)
            parts.append(emit)
            if stop is not None:
                self._stopped = stop
                return TextDelta("".join(parts), stop, place + 1)
        return TextDelta("".join(parts), None, len(ids))

    def _push_text(self, text: str, tokens: int) -> TextDelta:
        self._count += tokens
        if self._matcher is None or self._count <= self._min_tokens:
            return TextDelta(text, None, tokens)
        emit, self._stopped = self._matcher.push(text)
        return TextDelta(emit, self._stopped, tokens)

    def _replay(self, ids: Sequence[int], text: str) -> None:
        if self._detokenizer is None:
            # The engine's text is what the log has; none of it was held back for long
            # enough to matter, because such engines cannot resume exactly anyway.
            self._count = len(ids)
            return
        if self._matcher is None:
            self._count = len(ids)
            replayed = self._decode(ids)
        else:
            delta = self._push_each(ids, len(ids))
            replayed = delta.text
        if replayed != text and len(replayed) > len(text):
            self._backlog = replayed[len(text) :]

    def _take_backlog(self) -> str:
        backlog, self._backlog = self._backlog, ""
        return backlog
