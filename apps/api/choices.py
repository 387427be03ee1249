"""Frames become answers: what each one adds to a choice, and what all choices came to."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from apps.api.errors import ApiError
from apps.api.toolparse import CallDelta, ToolParser
from inference.messages import Frame, TokenLogprob
from inference.text.protocol import Tokenizer


class Delta(msgspec.Struct):
    """What became certain for one choice. (Made for every token: a Struct costs a fifth of a dataclass.)

    Attributes:
        seq: number of the frame it stems from.
        pieces: text and calls in the order of the answer, where there may be calls.
        logprobs: entries of the tokens whose text this completes.
        finish: ``stop``, ``length`` or ``tool_calls`` on the last one.
    """

    seq: int
    text: str = ""
    calls: list[CallDelta] = []
    pieces: list[str | CallDelta] = []
    logprobs: list[TokenLogprob] = []
    finish: str | None = None
    ids: list[int] = []
    stop_match: str | int | None = None


class Choice:
    """One answer being put together out of frames."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolParser | None, *, logprobs: bool, echo: str = "") -> None:
        self.parser = parser
        self.echo = echo
        self.text: list[str] = []
        self.calls: list[CallDelta] = []
        self.pieces: list[str | CallDelta] = []
        self.logprobs: list[TokenLogprob] = []
        self.tokens = 0
        self.cached = 0
        self.finish: str | None = None
        self.stop_match: str | int | None = None
        self._eos = tokenizer.eos_ids
        self._logprobs = logprobs
        self._held: list[TokenLogprob] = []
        self._held_ids: list[int] = []

    def feed(self, frame: Frame) -> Delta | None:
        """What the frame adds, or ``None`` where nothing of it can be shown yet.

        Raises:
            ApiError: the engine failed on this answer.
        """
        if frame.finish == "error":
            raise ApiError(500, frame.error or "The engine failed on this request.", code="engine_error")
        self.tokens += len(frame.ids)
        self.cached = max(self.cached, frame.cached)
        self._held_ids += frame.ids
        if self._logprobs and frame.logprobs:
            self._held += frame.logprobs
        delta = self._read(frame)
        if frame.finish is not None:
            self._close(delta, frame)
        elif not delta.text and not delta.calls:
            return None
        if delta.text or delta.finish:
            delta.logprobs, self._held = self._held, []
        delta.ids, self._held_ids = self._held_ids, []
        self.text.append(delta.text)
        self.calls += delta.calls
        self.pieces += delta.pieces
        self.logprobs += delta.logprobs
        return delta

    def _read(self, frame: Frame) -> Delta:
        if self.parser is None:
            return Delta(frame.seq, frame.text)
        parsed = self.parser.feed(frame.text)
        return Delta(frame.seq, parsed.content, parsed.calls, parsed.pieces)

    def _close(self, delta: Delta, frame: Frame) -> None:
        if self.parser is not None:
            rest = self.parser.finish()
            delta.text += rest.content
            delta.calls += rest.calls
            delta.pieces += rest.pieces
        # A stop string may lie in the arguments: what can not be read is no call that asks to be made.
        calls = self.parser is not None and self.parser.count > 0 and not self.parser.cut
        delta.finish = "tool_calls" if calls and frame.finish == "stop" else frame.finish
        delta.stop_match = frame.stop_match
        self.finish, self.stop_match = delta.finish, frame.stop_match
        # A token that only ends the answer is counted, but it is not part of the answer.
        if frame.finish == "stop" and self._held and frame.ids:
            last = frame.ids[-1]
            if last == frame.stop_match or (frame.stop_match is None and last in self._eos):
                self._held.pop()


@dataclass(slots=True)
class Usage:
    """Token counts over all choices."""

    prompt: int
    completion: int
    cached: int

    def to_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
