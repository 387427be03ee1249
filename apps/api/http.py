"""The base of this package's HTTP consumers: bodies in, generations out, errors in one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from apps.accounts.principal import Principal
from apps.api.errors import ApiError, from_refusal, invalid
from apps.api.generation import Generation
from apps.api.plan import Plan
from apps.api.render.base import Renderer, error_event, queue_event
from inference.errors import Refused, StoreUnavailable
from sluice.consumers import StreamingHttpConsumer

#: Statuses that the official clients would repeat by themselves although it is pointless.
_FINAL = frozenset({408, 409})


class ApiConsumer(StreamingHttpConsumer):
    """An endpoint of the API."""

    @property
    def caller(self) -> Principal:
        principal: Principal = self.principal
        return principal

    def need(self, scope: str) -> None:
        """Raise 403 unless the caller holds the scope ``generate``, ``read`` or ``admin``."""
        if not self.caller.may(scope):
            raise ApiError(403, f"This key lacks the scope {scope!r}.", code="insufficient_scope")

    @property
    def client(self) -> str:
        """The peer's address, for the operator's view."""
        peer = self.scope.get("client")
        return str(peer[0]) if peer else ""

    @property
    def query(self) -> dict[str, list[str]]:
        """The fields of the query, those without a value left out.

        Raises:
            ApiError: 400, too many.
        """
        try:
            return parse_qs(self.scope.get("query_string", b"").decode("latin-1"), max_num_fields=20)
        except ValueError:
            raise invalid("The query has more than 20 fields.", None, "invalid_value") from None

    def error_reply(self, exc: Exception) -> tuple[int, Any, list[tuple[bytes, bytes]]]:
        if isinstance(exc, (Refused, StoreUnavailable)):
            exc = from_refusal(exc, "", 2.0)
        if not isinstance(exc, ApiError):
            return super().error_reply(exc)
        headers = [item for item in exc.headers() if item[0] != b"content-type"]
        if exc.status in _FINAL:
            headers.append((b"x-should-retry", b"false"))
        return exc.status, exc.payload(), headers

    async def on_stream_error(self, exc: BaseException | None) -> None:
        if not self.is_sse:
            return
        if exc is None:
            exc = ApiError(503, "The server is shutting down.", code="shutting_down")
        elif not isinstance(exc, ApiError):
            exc = ApiError(500, "The server failed to complete the answer.", code="internal_error")
        await self.send_sse_bytes(self.error_events(exc))

    async def serve(self, plan: Plan, make: Callable[[Generation], Renderer]) -> None:
        """Generate and answer, as a stream or whole, whichever the plan says."""
        generation = Generation(plan, self.caller, client=self.client, transport="sse" if plan.stream else "json")
        if plan.stream:
            await self._stream(generation, make)
        else:
            await self._whole(generation, make)

    async def _whole(self, generation: Generation, make: Callable[[Generation], Renderer]) -> None:
        async with generation:
            while not generation.done:
                await generation.next()
        renderer = make(generation)
        await self.before_end(renderer)
        await self.send_json(200, renderer.body(), self._headers(generation))

    async def before_end(self, renderer: Renderer) -> None:
        """The answer is complete; its end has not been sent yet."""

    async def _stream(self, generation: Generation, make: Callable[[Generation], Renderer]) -> None:
        try:
            async with generation:
                renderer = make(generation)
                await self.start_sse(self._headers(generation))
                if first := renderer.start():
                    await self.send_sse_bytes(first)
                await self._pump(generation, renderer)
                await self.before_end(renderer)
                await self.send_sse_bytes(renderer.end())
        except ApiError as exc:
            if not self.headers_sent:
                raise
            # The status line has gone: the error is an event, and nothing pretends to be an end.
            await self.send_sse_bytes(self.error_events(exc))

    def error_events(self, exc: ApiError) -> bytes:
        """The events that say so."""
        return error_event(exc)

    async def _pump(self, generation: Generation, renderer: Renderer) -> None:
        tell_queue = bool(generation.plan.options.include_queue)
        if tell_queue:
            await self._tell_queue(generation)
        while not generation.done:
            batch = await generation.next()
            if batch:
                await self.send_sse_bytes(b"".join([renderer.delta(index, delta) for index, delta in batch]))
            elif not (tell_queue and await self._tell_queue(generation)):
                await self.ping()

    async def _tell_queue(self, generation: Generation) -> bool:
        state = await generation.queue_state()
        if state is None:
            return False
        await self.send_sse_bytes(queue_event(*state))
        return True

    @staticmethod
    def _headers(generation: Generation) -> list[tuple[bytes, bytes]]:
        """The request's id, and how much of the caller's limits is left."""
        return [(b"x-sluice-request", generation.plan.id.encode()), *generation.limit_headers]
