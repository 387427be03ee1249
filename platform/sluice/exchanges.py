"""Open exchanges: every HTTP and WebSocket conversation from its scope to its last body byte.

The middleware is the outermost application of all. It knows nothing of Django, so
that no middleware, thread or streaming response can come between it and the
server. Shutdown waits for its count, the heartbeat and the metrics show it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from inference import tracing
from sluice import logs

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Exchange:
    """One open conversation. Released once, however many endings it meets."""

    __slots__ = ("id", "kind", "label", "opened", "registry")

    def __init__(self, registry: ExchangeRegistry, kind: str, label: str, request_id: str) -> None:
        self.registry: ExchangeRegistry | None = registry
        self.kind = kind
        self.label = label
        self.id = request_id
        self.opened = time.monotonic()

    def release(self) -> None:
        registry, self.registry = self.registry, None
        if registry is not None:
            registry._remove(self)

    def is_stream(self) -> None:
        """From now on it counts as an event stream."""
        if self.registry is not None and self.kind == "http":
            self.registry._counts[self.kind, self.label] -= 1
            self.kind = "sse"
            self.registry._counts[self.kind, self.label] += 1


class ExchangeRegistry:
    """All open exchanges of this process. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._open: set[Exchange] = set()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._empty: asyncio.Event | None = None
        self.total = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, kind: str, label: str, request_id: str) -> Exchange:
        exchange = Exchange(self, kind, label, request_id)
        self._open.add(exchange)
        self._counts[kind, label] += 1
        self.total += 1
        return exchange

    def _remove(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        key = (exchange.kind, exchange.label)
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
        if not self._open and self._empty is not None:
            self._empty.set()

    def counts(self) -> dict[tuple[str, str], int]:
        """Open exchanges by (kind, route template)."""
        return {key: n for key, n in self._counts.items() if n}

    def snapshot(self) -> dict[str, int]:
        """The same for people and heartbeats: ``{"sse /v1/chat/completions": 3}``."""
        return {f"{kind} {label}": n for (kind, label), n in sorted(self.counts().items())}

    def ids(self) -> list[str]:
        """Request ids of the open exchanges, oldest first."""
        return [e.id for e in sorted(self._open, key=lambda e: e.opened)]

    async def wait_empty(self) -> None:
        """Return as soon as no exchange is open."""
        while self._open:
            self._empty = asyncio.Event()
            await self._empty.wait()
        self._empty = None


class ExchangeMiddleware:
    """Counts an exchange until its last body message has been sent or its task has ended.

    Also gives each exchange its request id: taken from ``X-Request-ID`` where that is
    harmless, put into the scope (``sluice.request_id``), every log line, and the response.
    """

    def __init__(self, app: Any, registry: ExchangeRegistry, label: Callable[[Scope], str]) -> None:
        self.app = app
        self.registry = registry
        self.label = label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        header = next((v for k, v in scope.get("headers", []) if k == b"x-request-id"), None)
        request_id = logs.clean_request_id(header)
        scope = {**scope, "sluice.request_id": request_id}
        token = logs.request_id.set(request_id)
        if tracing.active():
            # Each exchange has a task, and so a context, of its own: nothing to reset.
            given = next((v for k, v in scope.get("headers", []) if k == b"traceparent"), b"")
            tracing.parent.set(given.decode("latin-1"))
        exchange = self.registry.open(scope["type"], self.label(scope), request_id)
        try:
            if scope["type"] == "http":
                await self.app(scope, receive, _counted_send(send, exchange))
            else:
                await self.app(scope, receive, send)
        finally:
            exchange.release()
            logs.request_id.reset(token)


def _counted_send(send: Send, exchange: Exchange) -> Send:
    async def counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            names = {bytes(name).lower(): bytes(value) for name, value in headers}
            if names.get(b"content-type", b"").startswith(b"text/event-stream"):
                exchange.is_stream()
            if b"x-request-id" not in names:
                headers.append((b"x-request-id", exchange.id.encode()))
                message = {**message, "headers": headers}
            await send(message)
        elif message["type"] == "http.response.body":
            try:
                await send(message)
            finally:
                exchange.release()
        else:
            await send(message)

    def fast(message: Message) -> Awaitable[None]:
        # Once per token of every stream: no coroutine in between.
        streams = message["type"] == "http.response.body" and message.get("more_body", False)
        return send(message) if streams else counted(message)

    return fast
