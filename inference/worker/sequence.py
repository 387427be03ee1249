"""One request while a worker holds it: from engine outputs to frames."""

from __future__ import annotations

import msgspec

from inference import tracing
from inference.engine.base import EngineOutput
from inference.lifecycle import Reason
from inference.messages import Frame, Job, decode_frame, encode
from inference.store.records import Claim
from inference.store.store import Append
from inference.text import TextStream, TokenBytes


class Sequence:
    """Numbers frames, builds their text, and finds the end that only text can show.

    Built from a claim; where the claim carries a log, it continues after it.
    """

    def __init__(self, claim: Claim, tokenizer: TokenBytes | None) -> None:
        job: Job = claim.job
        self.id = claim.id
        self.job = job
        self.attempt = claim.attempt
        self.server = claim.server
        self.finished = False
        self.finish: str | None = None
        self.trace = tracing.WorkTrace()
        frames = [decode_frame(raw) for raw in claim.log]
        self.resumed: list[int] = [i for f in frames for i in f.ids]
        self.seq = len(frames)
        self.tokens = len(self.resumed)
        self.logged_finish = frames[-1].finish if frames else None
        self._shown = any(f.text for f in frames)
        self._text = TextStream(
            tokenizer,
            job.params.stop,
            min_tokens=job.params.min_tokens,
            ids=self.resumed,
            text="".join(f.text for f in frames),
            continues=job.continues,
        )

    @property
    def stop_found(self) -> bool:
        """Whether the replayed tokens already hold a stop string (the worker died before saying so)."""
        return self._text.stopped is not None

    def take(self, output: EngineOutput) -> Append | None:
        """The next frame, or ``None`` where the output adds nothing to show or to log."""
        ids, logprobs = output.ids, output.logprobs
        delta = self._text.push(ids, output.hidden, output.text)
        finish, stop_match = output.finish, output.stop_match
        text, match = delta.text, stop_match
        if delta.finished_by is not None:
            finish, match = "stop", delta.finished_by  # type: ignore[assignment]
            ids = ids[: delta.used]
            logprobs = logprobs[: delta.used] if logprobs is not None else None
        elif finish is not None:
            text += self._text.finish(finish)
            if self._text.stopped is not None:
                finish, match = "stop", self._text.stopped  # type: ignore[assignment]
        if not ids and not text and finish is None:
            return None
        return self._frame(Frame(self.seq + 1, list(ids), text, finish, logprobs, output.error, output.cached, match))

    def close(self, finish: str, error: str | None = None) -> Append:
        """A last frame that no engine output stands for (a limit met in the log, a refusal)."""
        text = self._text.finish(finish)
        return self._frame(Frame(self.seq + 1, [], text, finish, None, error))

    def _frame(self, frame: Frame) -> Append:
        self.seq = frame.seq
        self.tokens += len(frame.ids)
        self.finish = frame.finish
        self.finished = frame.finish is not None
        # Time to first token is what a reader waits: tokens that are held back (they may be the beginning of a
        # stop string) are not there yet. An answer without any text is there when it ends.
        self._shown = self._shown or bool(frame.text) or self.finished
        return Append(
            self.id,
            self.attempt,
            frame.seq,
            encode(frame),
            self.tokens,
            frame.finish or "",
            self.server,
            self._shown,
        )


def raw(frame: bytes) -> msgspec.Raw:
    """Embed an encoded frame without encoding it again."""
    return msgspec.Raw(frame)


ENDINGS = {"stop": Reason.STOP, "length": Reason.LENGTH}
"""How a frame's finish reads as the reason of a finished request."""
