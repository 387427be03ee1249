"""Deterministic tokens at a set pace: an engine without a model.

For tests and for measuring everything around the model. Each token is a pure
function of (prompt ids, seed, position), so that a continuation on another
worker is the one that an undisturbed run would have given.

Target (``alias=scripted:rate=50,context=4096``), all optional:

=============  ==========================================================================
``rate``       tokens per second of each sequence; 0 (default) is as fast as it goes
``prefill``    seconds of prefill per 1,000 prompt tokens, default 0
``load``       seconds that loading takes, default 0
``context``    longest prompt plus answer, tokens, default 4096
``slots``      sequences at once; default is the configured ``max_running``
``cache``      tokens that all running sequences may hold together; 0 (default) is no bound
``faults``     1: obey fault marks in the prompt
``say``        1: obey ``[[say:TEXT]]`` in the prompt - the answer is TEXT
=============  ==========================================================================

Of the sampling parameters it knows ``max_tokens``, ``min_tokens``, ``seed`` (where there is a
temperature), ``stop_token_ids``, ``ignore_eos`` and ``logprobs`` (made up); of grammars ``choice``
(the first one) and ``json_object``. Other grammars fail the request, the rest has no effect.

Fault marks, ``[[NAME]]`` or ``[[NAME@K]]`` with K tokens of the answer made (default 0):
``error`` fails this sequence alone; ``raise`` ends the engine; ``hang`` stops its
steps while the event loop goes on; ``freeze`` blocks the whole thread; ``kill`` ends
the process with SIGKILL. The last four strike only where the sequence was not resumed
from logged tokens, so that a second attempt succeeds; ``poison`` kills every time.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import re
import signal
import time
import zlib
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec

from inference.engine.base import Died, EngineOutput, Sink
from inference.engine.scripted_answer import ScriptedAnswer, logprob
from inference.engine.scripted_tokenizer import EOS, ScriptedTokenizer
from inference.errors import ConfigError, EngineDied, Overloaded, TooLarge
from inference.messages import EngineStats, Job, ModelInfo

__all__ = ["ScriptedEngine", "ScriptedOptions", "ScriptedTokenizer"]

_MARK = re.compile(rb"\[\[(error|raise|hang|freeze|kill|poison)(?:@(\d+))?\]\]")
_SAY = re.compile(rb"\[\[say:(.*?)\]\]", re.DOTALL)
_MAX_DEBT = 1.0  # seconds of lateness that are made up for; beyond it the pace starts anew
_STEPS_PER_TURN = 16  # catching up must leave the event loop some air


class ScriptedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a target; see the module for their meaning and units."""

    rate: float = 0.0
    prefill: float = 0.0
    load: float = 0.0
    context: int = 4096
    slots: int = 0
    cache: int = 0
    faults: bool = False
    say: bool = False

    @classmethod
    def parse(cls, text: str) -> ScriptedOptions:
        """Parse ``name=value,...``; ``default`` and an empty text mean all defaults.

        Raises:
            ConfigError: unknown name or malformed value.
        """
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for part in text.replace(";", ",").split(","):
            if not part or part == "default":
                continue
            name, _, raw = part.partition("=")
            if name not in hints:
                raise ConfigError(f"scripted engine: {name!r} is none of {', '.join(hints)}")
            try:
                values[name] = msgspec.convert(raw, hints[name], strict=False)
            except msgspec.ValidationError:
                raise ConfigError(f"scripted engine: {part!r} has no valid value") from None
            if values[name] < 0:
                raise ConfigError(f"scripted engine: {name} must not be negative")
        options = cls(**values)
        if options.context < 1:
            raise ConfigError("scripted engine: context must be at least 1")
        return options


class ScriptedEngine:
    """See the module; the contract is :class:`inference.engine.base.Engine`."""

    def __init__(self, options: ScriptedOptions, *, alias: str, max_running: int = 32) -> None:
        self._options = options
        self._alias = alias
        self._slots = options.slots or max_running
        self._running: dict[str, ScriptedAnswer] = {}
        self._prefilling: list[tuple[float, int, ScriptedAnswer]] = []
        self._held: dict[str, ScriptedAnswer] = {}
        self._held_tokens = 0
        self._submitted = 0
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        self._dead = False
        self._hung = False
        self._sink: Sink | None = None
        self._died: Died | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._steps = 0
        self._generated = 0
        self._prompt_tokens = 0
        self._last_step = 0.0
        self._step_seconds = 0.0

    # Contract

    async def load(self, sink: Sink, died: Died) -> ModelInfo:
        await asyncio.sleep(self._options.load)
        self._loop = asyncio.get_running_loop()
        self._sink, self._died = sink, died
        context = self._options.context
        return ModelInfo(
            alias=self._alias,
            engine="scripted",
            context_length=context,
            capacity_tokens=min(context, self._options.cache or context),
            slots=self._slots,
        )

    def submit(self, job: Job, resumed: Sequence[int] = ()) -> None:
        if self._dead or self._loop is None:
            raise EngineDied("The engine has stopped.")
        need = len(job.prompt_ids) + job.params.max_tokens
        most = min(self._options.context, self._options.cache or self._options.context)
        if need > most:
            raise TooLarge(f"Prompt and answer need {need} tokens; the model holds {most}.")
        if not self.fits(job, len(resumed)):
            raise Overloaded("No slot is free.")
        sequence = self._make(job, resumed)
        self._held[job.id] = sequence
        self._held_tokens += sequence.cost
        self._prompt_tokens += len(job.prompt_ids)
        self._submitted += 1
        wait = self._options.prefill * (len(job.prompt_ids) + len(resumed)) / 1000
        heapq.heappush(self._prefilling, (self._loop.time() + wait, self._submitted, sequence))
        if self._timer is not None and not self._running:
            # The step may be due for a longer prefill than this one.
            self._timer.cancel()
            self._timer = None
        self._schedule()

    def abort(self, request_id: str) -> None:
        self._release(request_id)

    def free_slots(self) -> int:
        return 0 if self._dead else self._slots - len(self._held)

    def fits(self, job: Job, resumed: int = 0) -> bool:
        need = len(job.prompt_ids) + job.params.max_tokens
        if need > self._options.context or self.free_slots() <= 0:
            return False
        return not self._options.cache or self._held_tokens + need <= self._options.cache

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._held) - len(self._running),
            slots=self._slots,
            blocks_total=self._options.cache or self._slots * self._options.context,
            blocks_used=self._held_tokens,
            steps=self._steps,
            step_seconds=self._step_seconds,
            last_step_seconds=self._last_step,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
        )

    async def close(self) -> None:
        self._stop()

    # Steps

    def _make(self, job: Job, resumed: Sequence[int]) -> ScriptedAnswer:
        seed = job.params.seed if job.params.temperature > 1e-5 else 0
        prompt = b"".join(token.to_bytes(4, "little") for token in job.prompt_ids)
        sequence = ScriptedAnswer(job, len(resumed), zlib.crc32(prompt, (seed or 0) & 0xFFFFFFFF))
        if self._options.faults or self._options.say:
            text = bytes(token for token in job.prompt_ids if token < 256)
            mark = _MARK.search(text) if self._options.faults else None
            if mark:
                sequence.fault, sequence.fault_at = mark[1], int(mark[2] or 0)
                if mark[1] == b"poison":
                    sequence.fault_at = max(sequence.fault_at, len(resumed))
                elif mark[1] != b"error" and resumed:
                    sequence.fault_at = -1
            said = _SAY.findall(text) if self._options.say else []
            if said:
                sequence.say(said[-1])
        if job.params.grammar is not None and sequence.script is None:
            sequence.obey(job.params.grammar)
        if resumed and self._ended_with(job, resumed):
            sequence.end = -1
        return sequence

    @staticmethod
    def _ended_with(job: Job, resumed: Sequence[int]) -> bool:
        """Whether the logged ids already hold the token that ended the answer."""
        if len(resumed) <= job.params.min_tokens:
            return False
        last = resumed[-1]
        return last in job.params.stop_token_ids or (last == EOS and not job.params.ignore_eos)

    def _schedule(self) -> None:
        """See to it that a step is due, while there is something to do."""
        if self._timer is not None or self._dead or self._hung or not self._held or self._loop is None:
            return
        now = self._loop.time()
        interval = 1 / self._options.rate if self._options.rate else 0.0
        if not self._running and self._prefilling:
            self._due = max(now, self._prefilling[0][0]) + interval
        elif interval:
            self._due = max(self._due + interval, now - _MAX_DEBT)
        else:
            self._due = now
        if self._due <= now:
            self._timer = self._loop.call_soon(self._turn)
        else:
            self._timer = self._loop.call_at(self._due, self._turn)

    def _turn(self) -> None:
        """Make the step that is due, and those that should have been made long ago."""
        assert self._loop is not None
        self._timer = None
        interval = 1 / self._options.rate if self._options.rate else 0.0
        for _ in range(_STEPS_PER_TURN):
            self._step()
            if self._hung or not interval or not self._running or self._due + interval > self._loop.time():
                break
            self._due += interval
        self._schedule()

    def _step(self) -> None:
        assert self._loop is not None
        assert self._sink is not None
        begun = self._loop.time()
        while self._prefilling and self._prefilling[0][0] <= begun:
            sequence = heapq.heappop(self._prefilling)[2]
            if self._held.get(sequence.id) is sequence:
                self._running[sequence.id] = sequence
        outputs: list[EngineOutput] = []
        for sequence in list(self._running.values()):
            if sequence.position == sequence.fault_at and not self._fault(sequence, outputs):
                return
            if sequence.id in self._running:
                outputs.append(self._advance(sequence))
        self._steps += 1
        self._last_step = self._loop.time() - begun
        self._step_seconds += self._last_step
        if outputs:
            self._sink(outputs)

    def _advance(self, sequence: ScriptedAnswer) -> EngineOutput:
        """The next token of one sequence; releases it where that is the last."""
        params = sequence.job.params
        position = sequence.position
        if sequence.end < 0 or position >= params.max_tokens:
            # Resumed from a log that already holds the whole answer.
            self._release(sequence.id)
            return EngineOutput(sequence.id, [], finish="stop" if sequence.end < 0 else "length")
        token = EOS if position >= sequence.end else sequence.next_token()
        sequence.position = position + 1
        self._generated += 1
        finish, hidden, match = None, 0, None
        if token in sequence.stops:
            if position < params.min_tokens:
                token = next(other for other in range(32, 128) if other not in sequence.stops)
            else:
                finish, hidden, match = "stop", 1, token
        if finish is None and position >= sequence.end:
            finish, hidden = "stop", 1
        elif finish is None and sequence.position >= params.max_tokens:
            finish = "length"
        logprobs = None if params.logprobs is None else [logprob(token, position, params.logprobs)]
        if finish is not None:
            self._release(sequence.id)
        return EngineOutput(sequence.id, [token], logprobs=logprobs, finish=finish, hidden=hidden, stop_match=match)

    def _fault(self, sequence: ScriptedAnswer, outputs: list[EngineOutput]) -> bool:
        """Carry out a fault mark; ``False`` where no step is made any more."""
        assert self._sink is not None
        assert self._died is not None
        sequence.fault_at = -1
        if sequence.fault == b"error":
            self._release(sequence.id)
            message = "The scripted engine failed this request."
            outputs.append(EngineOutput(sequence.id, [], finish="error", error=message))
            return True
        if outputs:
            self._sink(outputs)
        if sequence.fault in (b"kill", b"poison"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif sequence.fault == b"freeze":
            time.sleep(3600)
        elif sequence.fault == b"hang":
            self._hung = True
        else:
            died = self._died
            self._stop()
            died(EngineDied("The scripted engine was told to raise."))
        return False

    def _release(self, request_id: str) -> None:
        """Give back all that a sequence holds; every ending comes through here, any number of times."""
        sequence = self._held.pop(request_id, None)
        if sequence is None:
            return
        self._running.pop(request_id, None)
        self._held_tokens -= sequence.cost
        if not self._held:
            self._prefilling.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _stop(self) -> None:
        self._dead = True
        for request_id in list(self._held):
            self._release(request_id)


def make(target: str, *, alias: str, max_running: int) -> ScriptedEngine:
    """The engine of a target.

    Raises:
        ConfigError: the target's options are malformed.
    """
    return ScriptedEngine(ScriptedOptions.parse(target), alias=alias, max_running=max_running)


def tokenizer_for(target: str) -> ScriptedTokenizer:
    """The tokenizer of a target, as API servers and workers use it.

    Raises:
        ConfigError: the target's options are malformed.
    """
    return ScriptedTokenizer(context_length=ScriptedOptions.parse(target).context)
