"""What every engine offers to the worker that owns it.

An engine turns token ids into token ids. It knows nothing of Redis, of
servers or of text: incremental detokenisation and stop strings belong to the
worker (``inference.text``). One contract suite (``tests/engine``) runs on all
engines.

Threads: every method is called from the worker's event loop thread. An engine
may generate elsewhere, but hands each step over to that loop through the sink,
called once per step with all outputs of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from inference.messages import EngineStats, Job, ModelInfo, TokenLogprob


class EngineOutput(msgspec.Struct, frozen=True):
    """What one step gave to one sequence.

    Attributes:
        ids: new token ids in order (the EOS or stop token that ended the
            answer included, so that they count as generated).
        text: for engines that produce text themselves; ``None`` means that the
            worker detokenises ``ids``.
        finish: ``stop``, ``length`` or ``error`` on the last output of a
            sequence, otherwise ``None``. After it the engine holds nothing of it.
        hidden: how many of the last ``ids`` must not appear in the text (an EOS
            or stop token).
        error: one sentence, with ``finish == "error"``; concerns this sequence alone.
        cached: prompt tokens that came out of the prefix cache (first output only).
        stop_match: the stop token id that ended the answer, if one did.
    """

    id: str
    ids: list[int]
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    hidden: int = 0
    error: str | None = None
    cached: int = 0
    stop_match: int | None = None


Sink = Callable[[Sequence[EngineOutput]], None]
"""Receives one step's outputs, in the event loop's thread, in order."""

Died = Callable[[BaseException], None]
"""Called once, in the event loop's thread, when the engine can not go on.

What it held gets no last output: those requests go on with another worker.
"""


@runtime_checkable
class Engine(Protocol):
    """The protocol. ``load`` may take minutes; all other methods return at once."""

    async def load(self, sink: Sink, died: Died) -> ModelInfo:
        """Load weights, allocate the cache, warm up. Ready to serve when it returns.

        Raises:
            ModelUnavailable: files missing, corrupt or of an unknown kind.
        """

    def submit(self, job: Job, resumed: Sequence[int] = ()) -> None:
        """Start generating. ``resumed`` are ids that the answer already has.

        ``resumed`` counts towards max_tokens, min_tokens and penalties, and
        shifts the seed's position, so that the continuation is the one that an
        undisturbed run would have produced; they are not emitted again.

        Raises:
            TooLarge: it can never fit this engine.
            Overloaded: no slot is free (the worker claims only what fits, so
                this marks a mistake of the caller).
            EngineDied: the engine has stopped.
        """

    def abort(self, request_id: str) -> None:
        """Stop generating; idempotent, unknown ids are ignored.

        No output of the sequence reaches the sink after this returns, and its
        slot is free within two steps.
        """

    def free_slots(self) -> int:
        """Sequences that could be submitted now without waiting."""

    def fits(self, job: Job, resumed: int = 0) -> bool:
        """Whether the job could start now, going by free cache blocks as well as slots."""

    def stats(self) -> EngineStats:
        """A snapshot; cheap enough for every heartbeat."""

    async def close(self) -> None:
        """Stop, free the device, join threads; idempotent."""
