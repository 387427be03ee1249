"""Stop strings, found across any split of the text and never shown.

The definition is the one of a reader who takes the text character by character:
the stop string that is *complete first* ends the answer. Where two are complete
with the same character, the longer one counts (it begins earlier), and of equal
strings the first listed. The outcome does not depend on how the text was split.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for several stop strings in a text that arrives in pieces.

    Holds back only a suffix that could still become a stop string. Empty stop
    strings are ignored. After a match it must not be used any more.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what may be shown and the stop string found, if any."""
        if not self._stops:
            return text, None
        if not text:
            return "", None
        text = self._held + text
        match = self._find(text)
        if match is not None:
            start, stop = match
            self._held = ""
            return text[:start], stop
        keep = len(text) - self._longest_beginning(text)
        self._held = text[keep:]
        return text[:keep], None

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest suffix of ``text`` with which some stop string begins."""
        longest = 0
        for stop in self._stops:
            # A suffix shorter than the longest so far needs no look.
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest

    @property
    def held(self) -> int:
        """Characters held back now."""
        return len(self._held)

    def flush(self) -> str:
        """End the text: what was held back is no stop string and comes out in full."""
        held, self._held = self._held, ""
        return held
