"""A resumable request that somebody reads again."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Self

from apps.accounts.principal import Principal
from apps.api import deps
from apps.api.choices import Choice, Delta
from apps.api.errors import from_refusal, unknown_request
from apps.api.generation import Generation
from apps.api.plan import Plan
from apps.api.schema.generation import StreamOptions
from inference.errors import NotFound, Refused, StoreUnavailable
from inference.gateway import RequestStream, StreamGroup
from inference.messages import Ending, Frame


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
        self.started = self._told = time.monotonic()
        self._ping_interval = deps.config().ping_interval
        self.first_token = None

    async def __aenter__(self) -> Self:
        gateway = deps.gateway()
        owner = "" if self._caller.may("admin") else self._caller.owner
        try:
            stream = await self._stack.enter_async_context(gateway.attach(self.request_id, owner=owner))
            try:
                # Asked after attaching: before, it may still have been alive.
                ending = None if stream.job is not None else await gateway.ending(self.request_id)
                await self._prepare(stream, ending)
            except BaseException as exc:
                # Whatever it is, also that the client has gone: the stream is left by it.
                await self._stack.__aexit__(type(exc), exc, exc.__traceback__)
                raise
        except NotFound:
            raise unknown_request(self.request_id) from None
        except (Refused, StoreUnavailable) as exc:
            raise from_refusal(exc, "", 2.0) from exc
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
            show_logprobs=job.params.logprobs if job is not None else None, created=stream.created_ms // 1000,
        )  # fmt: skip
        self.choices = [Choice(tokenizer, None, logprobs=True)]
        self.streams = [stream]
        self._group = StreamGroup(self.streams)

    def _feed(self, index: int, frame: Frame) -> Delta | None:
        if frame.logprobs and self.plan.show_logprobs is None:
            self.plan.show_logprobs = max(len(entry.top) for entry in frame.logprobs)
        return super()._feed(index, frame)
