"""Requests in flight: look at one, cancel it, read on in its stream."""

from __future__ import annotations

import asyncio
from typing import Any

from apps.accounts.principal import Principal
from apps.api import deps
from apps.api.errors import ApiError, invalid, unknown_request
from apps.api.http import ApiConsumer
from apps.api.reattached import Reattached
from apps.api.render.base import Renderer, error_event
from apps.api.render.chat import ChatRenderer
from apps.api.render.completions import CompletionRenderer
from apps.api.render.generate import GenerateRenderer
from apps.api.schema.base import MAX_CHOICES, expect_nothing
from inference.lifecycle import Reason
from inference.store import RequestView

#: The format of an answer can be told from its id.
RENDERERS: dict[str, type[ChatRenderer | CompletionRenderer | GenerateRenderer]] = {
    "chatcmpl": ChatRenderer,
    "cmpl": CompletionRenderer,
}


async def find(request_id: str, caller: Principal) -> list[RequestView]:
    """The live jobs of a request: one, or one per answer where it has several."""
    gateway = deps.gateway()
    view = await gateway.view(request_id)
    found = [view] if view is not None else []
    if view is None and (first := await gateway.view(f"{request_id}-0")) is not None:
        others = await asyncio.gather(*(gateway.view(f"{request_id}-{n}") for n in range(1, MAX_CHOICES)))
        found = [first, *(view for view in others if view is not None)]
    return [view for view in found if caller.owns(view.owner)]


def describe(view: RequestView) -> dict[str, Any]:
    """A request as its owner sees it."""
    return {
        "id": view.id,
        "object": "request",
        "state": view.state,
        "phase": view.phase,
        "model": view.model,
        "endpoint": view.endpoint,
        "transport": view.transport,
        "priority": view.priority,
        "resumable": view.resumable,
        "attempt": view.attempt,
        "position": view.position,
        "prompt_tokens": view.prompt_tokens,
        "completion_tokens": view.generated_tokens,
        "max_tokens": view.max_tokens,
        "created_ms": view.created_ms,
        "first_token_ms": view.first_token_ms or None,
        "deadline_ms": view.deadline_ms or None,
    }


class RequestConsumer(ApiConsumer):
    """``GET`` and ``DELETE /v1/requests/{id}``."""

    async def get(self, body: bytes) -> None:
        self.need("read")
        request_id = self.kwargs["request_id"]
        views = await find(request_id, self.caller)
        if len(views) == 1 and views[0].id == request_id:
            await self.send_json(200, describe(views[0]))
        elif views:
            await self.send_json(
                200, {"id": request_id, "object": "request", "requests": [describe(view) for view in views]}
            )
        else:
            await self.send_json(200, await self._ended(request_id))

    async def delete(self, body: bytes) -> None:
        await self.cancel_request()

    async def cancel_request(self) -> None:
        """End the request; repeating it is harmless."""
        self.need("generate")
        request_id = self.kwargs["request_id"]
        views = await find(request_id, self.caller)
        if not views:
            await self.send_json(200, {**await self._ended(request_id), "cancelled": False})
            return
        cancelled = False
        for view in views:
            reason = Reason.USER if view.owner == self.caller.owner else Reason.ADMIN
            cancelled |= await deps.gateway().cancel(view.id, reason) is not None
        await self.send_json(200, {"id": request_id, "object": "request", "cancelled": cancelled})

    async def _ended(self, request_id: str) -> dict[str, Any]:
        ending = await deps.gateway().ending(request_id)
        if ending is None or not self.caller.owns(ending.owner):
            raise unknown_request(request_id)
        return {
            "id": ending.id,
            "object": "request",
            "state": ending.state,
            "reason": ending.reason,
            "model": ending.model,
            "endpoint": ending.endpoint,
            "prompt_tokens": ending.prompt_tokens,
            "completion_tokens": ending.generated_tokens,
            "created_ms": ending.created_ms,
            "ended_ms": ending.ended_ms,
        }


class CancelConsumer(RequestConsumer):
    """``POST /v1/requests/{id}/cancel``."""

    async def post(self, body: bytes) -> None:
        expect_nothing(body)
        await self.cancel_request()


class EventsConsumer(ApiConsumer):
    """``GET /v1/requests/{id}/events``: read on in a resumable request's stream."""

    async def get(self, body: bytes) -> None:
        self.need("generate")
        request_id, after = self.kwargs["request_id"], self._after()
        if self.method == "HEAD":
            await self._look(request_id)
            return
        renderer: Renderer | None = None
        try:
            async with Reattached(request_id, self.caller) as generation:
                renderer = RENDERERS.get(request_id.partition("-")[0], GenerateRenderer)(generation)
                await self.start_sse([(b"x-sluice-request", request_id.encode())])
                if after == 0 and (first := renderer.start()):
                    await self.send_sse_bytes(first)
                while not generation.done:
                    batch = await generation.next()
                    # Also what the client has is rendered: places in the text are counted on from there.
                    made = [(delta.seq, renderer.delta(0, delta)) for _, delta in batch]
                    if events := b"".join(event for seq, event in made if seq > after):
                        await self.send_sse_bytes(events)
                    elif not batch:
                        await self.ping()
                await self.send_sse_bytes(renderer.end())
        except ApiError as exc:
            if not self.headers_sent:
                raise
            await self.send_sse_bytes(error_event(exc))

    async def _look(self, request_id: str) -> None:
        """HEAD: attaching would take the stream away from its reader."""
        view = await deps.gateway().view(request_id)
        ending = await deps.gateway().ending(request_id) if view is None else None
        found = view or ending
        if found is None or not self.caller.owns(found.owner) or (view is not None and not view.resumable):
            raise unknown_request(request_id)
        await self.start_sse([(b"x-sluice-request", request_id.encode())])

    def _after(self) -> int:
        """Number of the last event that the client has: the header, or ``?after=``."""
        name, value = "Last-Event-ID", self.header("last-event-id")
        if not value:  # an empty one says that no event has been seen
            name, value = "after", self.query.get("after", ["0"])[0]
        if not value.isascii() or not value.isdigit() or len(value) > 10:
            raise invalid(f"{name} must be the number of an event.", name, "invalid_value")
        return int(value)
