"""One API request while it is generated: its streams, and what each frame means for the client."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from apps.accounts.limits import Lease, LimitExceeded, limiter_of
from apps.accounts.principal import Principal
from apps.api import deps
from apps.api.errors import (
    ApiError,
    detached,
    from_outcome,
    from_refusal,
    header_pairs,
    over_limit,
    unknown_request,
)
from apps.api.plan import Plan
from apps.api.schema.generation import StreamOptions
from apps.api.toolparse import CallDelta, ToolParser
from inference.errors import NotFound, Refused, StoreUnavailable
from inference.gateway import Detached, RequestEnded, RequestSpec, RequestStream, StreamGroup
from inference.lifecycle import Outcome
from inference.messages import Ending, Frame, TokenLogprob
from inference.text.protocol import Tokenizer


@dataclass(slots=True)
class Delta:
    """What became certain for one choice.

    Attributes:
        seq: number of the frame it stems from.
        logprobs: entries of the tokens whose text this completes.
        finish: ``stop``, ``length`` or ``tool_calls`` on the last one.
    """

    seq: int
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    ids: list[int] = field(default_factory=list)
    stop_match: str | int | None = None


class Choice:
    """One answer being put together out of frames."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolParser | None, *, logprobs: bool, echo: str = "") -> None:
        self.parser = parser
        self.echo = echo
        self.text: list[str] = []
        self.calls: list[CallDelta] = []
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
        self.logprobs += delta.logprobs
        return delta

    def _read(self, frame: Frame) -> Delta:
        if self.parser is None:
            return Delta(frame.seq, frame.text)
        parsed = self.parser.feed(frame.text)
        return Delta(frame.seq, parsed.content, parsed.calls)

    def _close(self, delta: Delta, frame: Frame) -> None:
        if self.parser is not None:
            rest = self.parser.finish()
            delta.text += rest.content
            delta.calls += rest.calls
        calls = self.parser is not None and self.parser.count > 0
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


class Generation:
    """All answers of one request, as an async context manager.

    Entering it gets the request accepted (or raises :class:`ApiError` with
    nothing sent yet); leaving it settles whatever is still open.
    """

    def __init__(self, plan: Plan, caller: Principal, *, client: str, transport: str) -> None:
        self.plan = plan
        self._caller, self._client, self._transport = caller, client, transport
        self._lease: Lease | None = None
        self.choices = [
            Choice(
                plan.tokenizer,
                plan.tools.parser() if plan.tools is not None else None,
                logprobs=job.params.logprobs is not None,
                echo=plan.echo[number // plan.per_prompt] if plan.echo else "",
            )
            for number, job in enumerate(plan.jobs)
        ]
        self.streams: list[RequestStream] = []
        self._stack = AsyncExitStack()
        self._group = StreamGroup([])
        self.started = time.monotonic()
        self.first_token: float | None = None

    async def __aenter__(self) -> Self:
        gateway, plan = deps.gateway(), self.plan
        try:
            self._lease = await self._stack.enter_async_context(
                limiter_of(gateway).hold(
                    self._caller.quotas,
                    plan.id,
                    prompt_tokens=max(len(job.prompt_ids) for job in plan.jobs),
                    max_tokens=max(job.params.max_tokens for job in plan.jobs),
                    choices=len(plan.jobs),
                )
            )
            for job in plan.jobs:
                spec = RequestSpec(
                    job=job,
                    endpoint=plan.endpoint,
                    transport=self._transport,
                    owner=self._caller.owner,
                    client=self._client,
                    priority=plan.priority,
                    timeout=plan.timeout,
                    resumable=plan.resumable,
                )
                self.streams.append(await self._stack.enter_async_context(gateway.request(spec)))
        except LimitExceeded as exc:
            raise over_limit(exc) from None
        except (Refused, StoreUnavailable) as exc:
            self._settle_lease(0)
            # Those already accepted are given up; nothing has been sent to the client.
            error = from_refusal(exc, plan.model, await wait_hint(plan.model, exc))
            await self._stack.__aexit__(type(error), error, None)
            raise error from exc
        except BaseException as exc:
            await self._stack.__aexit__(type(exc), exc, exc.__traceback__)
            raise
        self._group = StreamGroup(self.streams)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        usage = self.usage()
        self._settle_lease(usage.prompt + usage.completion)
        await self._stack.__aexit__(kind, exc, trace)

    def _settle_lease(self, used: int) -> None:
        """What counts against the caller's limits in the end, instead of all that was reserved."""
        if self._lease is not None:
            self._lease.used = used

    @property
    def limit_headers(self) -> list[tuple[bytes, bytes]]:
        """How much of the caller's limits is left; empty where nothing is limited."""
        return list(header_pairs(self._lease.headers)) if self._lease is not None else []

    @property
    def done(self) -> bool:
        return self._group.done

    async def next(self) -> list[tuple[int, Delta]]:
        """What became certain, per choice; ``[]`` asks for a ping.

        May return more than one delta of a choice, in order.

        Raises:
            ApiError: the request has ended before its answer was complete.
        """
        while True:
            try:
                batch = await self._group.next()
            except RequestEnded as exc:
                raise from_outcome(exc.outcome, str(exc)) from exc
            except Detached as exc:
                raise detached() from exc
            except StoreUnavailable as exc:
                raise from_refusal(exc, self.plan.model, 1.0) from exc
            out = [
                (index, delta)
                for index, frames in batch
                for frame in frames
                if (delta := self._feed(index, frame)) is not None
            ]
            if out or not batch or self.done:
                return out

    def _feed(self, index: int, frame: Frame) -> Delta | None:
        if self.first_token is None and frame.ids:
            self.first_token = time.monotonic()
        delta = self.choices[index].feed(frame)
        if delta is not None and delta.finish == "tool_calls":
            self.streams[index].outcome = Outcome.finished("tool_calls")
        return delta

    async def queue_state(self) -> tuple[int, float] | None:
        """Position in the queue (0 is next) and estimated seconds; ``None`` once running."""
        for stream in self.streams:
            position = await stream.queue_position()
            if position is not None:
                return position, await deps.gateway().retry_after(self.plan.model)
        return None

    def usage(self) -> Usage:
        return Usage(
            self.plan.prompt_tokens,
            sum(choice.tokens for choice in self.choices),
            sum(choice.cached for choice in self.choices[:: self.plan.per_prompt]),
        )

    def timings(self) -> dict[str, float]:
        """Milliseconds as this server saw them: to the first token, and in all."""
        now = time.monotonic()
        out = {"total_ms": round((now - self.started) * 1000, 1)}
        if self.first_token is not None:
            out["ttft_ms"] = round((self.first_token - self.started) * 1000, 1)
        return out


async def wait_hint(model: str, exc: BaseException) -> float:
    """Seconds after which to try again, where the exception itself names none."""
    if isinstance(exc, StoreUnavailable) or getattr(exc, "retry_after", None) is not None:
        return 2.0
    try:
        return float(await deps.gateway().retry_after(model))
    except (StoreUnavailable, Refused):
        return 2.0


class Reattached(Generation):
    """A resumable request read again from its beginning, by another client of its owner.

    What was sent before is produced again, so that the caller can leave out
    what its client already has and everything after comes out as it would have.

    Raises:
        ApiError: 404 on entering: not alive nor retained, not resumable, or not the caller's.
    """

    def __init__(self, request_id: str, caller: Principal) -> None:
        self.request_id = request_id
        self._caller = caller
        self._lease = None
        self._stack = AsyncExitStack()
        self.streams = []
        self.started = time.monotonic()
        self.first_token = None

    async def __aenter__(self) -> Self:
        gateway = deps.gateway()
        owner = "" if self._caller.may("admin") else self._caller.owner
        try:
            ending = await gateway.ending(self.request_id)
            stream = await self._stack.enter_async_context(gateway.attach(self.request_id, owner=owner))
        except NotFound:
            raise unknown_request(self.request_id) from None
        except (Refused, StoreUnavailable) as exc:
            raise from_refusal(exc, "", 2.0) from exc
        try:
            await self._prepare(stream, ending)
        except BaseException as exc:
            await self._stack.__aexit__(type(exc), exc, exc.__traceback__)
            raise
        return self

    async def _prepare(self, stream: RequestStream, ending: Ending | None) -> None:
        job = stream.job
        if job is None and ending is None:
            raise unknown_request(self.request_id)
        model = job.model if job is not None else ending.model  # type: ignore[union-attr]
        prompt = len(job.prompt_ids) if job is not None else ending.prompt_tokens  # type: ignore[union-attr]
        tokenizer = await deps.tokenizer(model)
        self.plan = Plan(
            self.request_id, model, "attach", tokenizer, [], prompt, stream=True, resumable=True,
            options=StreamOptions(include_usage=True),
            show_logprobs=job.params.logprobs if job is not None else None,
        )  # fmt: skip
        self.choices = [Choice(tokenizer, None, logprobs=True)]
        self.streams = [stream]
        self._group = StreamGroup(self.streams)

    def _feed(self, index: int, frame: Frame) -> Delta | None:
        if frame.logprobs and self.plan.show_logprobs is None:
            self.plan.show_logprobs = max(len(entry.top) for entry in frame.logprobs)
        return super()._feed(index, frame)
