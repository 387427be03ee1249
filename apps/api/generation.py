"""One API request while it is generated: its streams, from acceptance to the last frame."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

from apps.accounts.limits import Lease, LimitExceeded, limiter_of
from apps.accounts.principal import Principal
from apps.api import deps
from apps.api.choices import Choice, Delta, Usage
from apps.api.errors import ApiError, from_detached, from_outcome, from_refusal, header_pairs, over_limit
from apps.api.plan import Plan
from inference.errors import Refused, StoreUnavailable
from inference.gateway import Detached, Gateway, RequestEnded, RequestSpec, RequestStream, StreamGroup
from inference.lifecycle import Outcome
from inference.messages import Frame

FOLLOW_INTERVAL = 1.0
"""Seconds between looks at a request of a limited caller that goes on without a reader."""


class Generation:
    """All answers of one request, as an async context manager.

    Entering it gets the request accepted (or raises :class:`ApiError` with
    nothing sent yet); leaving it settles whatever is still open.
    """

    #: What ended it, while there is still text from before to be given out.
    _broken: ApiError | None = None

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
        self.started = self._told = time.monotonic()
        self._ping_interval = deps.config().ping_interval
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
            raise over_limit(exc, plan.asked_as) from None
        except (Refused, StoreUnavailable) as exc:
            self._settle_lease(0)
            # Those already accepted are given up; nothing has been sent to the client.
            error = from_refusal(exc, plan.model, await wait_hint(plan.model, exc), plan.prompt_as)
            await self._stack.aclose()
            raise error from exc
        except BaseException as exc:
            # Whatever it is, also that the client has gone: those already accepted end by it.
            await self._stack.__aexit__(type(exc), exc, exc.__traceback__)
            raise
        self._group = StreamGroup(self.streams)
        plan.created = self.streams[0].created_ms // 1000  # what every other server says that reads it again
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        usage = self.usage()
        self._settle_lease(usage.prompt + usage.completion)
        if self._lease is not None and self.plan.resumable and not self.done:
            ids = [stream.id for stream in self.streams]
            self._lease.rest = partial(_used_in_all, deps.gateway(), ids, usage)
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
        return self._group.done and self._broken is None

    async def next(self) -> list[tuple[int, Delta]]:
        """What became certain, per choice; ``[]`` asks for a ping.

        May return more than one delta of a choice, in order.

        Raises:
            ApiError: the request has ended before its answer was complete.
        """
        if self._broken is not None:
            raise self._broken
        while True:
            try:
                batch = await self._group.next()
            except RequestEnded as exc:
                raise from_outcome(exc.outcome, str(exc)) from exc
            except Detached as exc:
                raise from_detached(exc) from exc
            except StoreUnavailable as exc:
                raise from_refusal(exc, self.plan.model, 1.0) from exc
            out: list[tuple[int, Delta]] = []
            try:
                for index, frames in batch:
                    for frame in frames:
                        if (delta := self._feed(index, frame)) is not None:
                            out.append((index, delta))  # noqa: PERF401 - those before an error count
            except ApiError as exc:
                if not out:
                    raise
                self._broken = exc  # with the next call: what was made before it comes first
            now = time.monotonic()
            # What is held back (a call of no use, blanks) must not be silence: the core saw no need for a ping.
            if out or not batch or self.done or now - self._told >= self._ping_interval:
                self._told = now
                return out

    def _feed(self, index: int, frame: Frame) -> Delta | None:
        if self.first_token is None and (frame.text or frame.finish):
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


async def _used_in_all(gateway: Gateway, ids: Sequence[str], known: Usage) -> int:
    """Wait until requests that may go on without their reader have ended; gives the tokens of all of them.

    ``known`` is what this reader has seen, and counts where the end is remembered no more.
    """
    generated = 0
    for request_id in ids:
        while True:
            try:
                if await gateway.view(request_id) is None:
                    ending = await gateway.ending(request_id)
                    break
            except StoreUnavailable:
                pass  # asked again, as long as this server runs
            await asyncio.sleep(FOLLOW_INTERVAL)
        if ending is None:
            return known.prompt + known.completion
        generated += ending.generated_tokens
    return known.prompt + generated
