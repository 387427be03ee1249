"""The base of HTTP consumers.

Channels' own HTTP consumer handles one message after another, so while its
handler runs it cannot see that the client has gone. Here the handler is a task of
its own and the consumer keeps receiving: ``http.disconnect`` cancels the handler at
once and waits for its clean-up. No task outlives the consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from channels.consumer import AsyncConsumer

from sluice import access, conf, logs
from sluice.consumers import live
from sluice.consumers.errors import HttpError, draining, error_object
from sluice.consumers.tasks import cancel_and_wait

logger = logging.getLogger("sluice.http")

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of nginx's kind must pass each event on at once; and nobody may compress (and so hold) it.
    (b"x-accel-buffering", b"no"),
]


class Disconnected(Exception):
    """The client went while its body was being read."""


class StreamingHttpConsumer(AsyncConsumer):
    """Answers one HTTP exchange.

    A subclass has a coroutine per method (``get``, ``post``, ``delete``; HEAD goes to
    ``get``), or overrides :meth:`handle`. It gets the whole body and replies with
    :meth:`send_json`, or with :meth:`start_sse` and :meth:`send_sse_bytes`. Whatever it
    leaves unfinished is finished for it.

    Attributes:
        scope: the ASGI scope. principal: who calls, as the route's access rule found
        out (``None`` on public routes). request_id: of this exchange. headers_sent,
        finished: how far the response has got. shutting_down: the task is being
        cancelled because the server ends.
    """

    #: Largest body in bytes; ``None`` for the server's setting.
    max_body_bytes: int | None = None
    #: A drain waits for it. ``False`` for endless feeds of pages, which end as soon as it begins to refuse.
    drain_waits = True

    def __init__(self) -> None:
        self.principal: Any = None
        self.headers_sent = False
        self.finished = False
        self.is_sse = False
        self.shutting_down = False
        self._task: asyncio.Task[None] | None = None

    # --- for subclasses ---------------------------------------------------------------

    async def handle(self, body: bytes) -> None:
        """Answer. The default calls the coroutine named after the method."""
        method = "get" if self.method == "HEAD" else self.method.lower()
        await getattr(self, method)(body)

    async def authorize(self) -> Any:
        """Who is calling, by the route's rule; raises :class:`HttpError` to refuse."""
        return await access.check(self.route.access if self.route else "key", self.scope)

    async def on_stream_error(self, exc: BaseException | None) -> None:
        """The handler failed after the status line had gone (``exc``), or the server ends (``None``)."""
        if not self.is_sse:
            return
        if exc is None:
            payload = error_object("The server is shutting down.", status=503, code="shutting_down")
        else:
            payload = error_object("The server failed to complete the answer.", status=500, code="internal_error")
        await self.send_sse_bytes(b"data: " + msgspec.json.encode(payload) + b"\n\n")

    def error_reply(self, exc: Exception) -> tuple[int, Any, list[tuple[bytes, bytes]]]:
        """Status, JSON payload and headers for an exception raised before any header was sent."""
        if isinstance(exc, HttpError):
            return exc.status, exc.payload(), exc.headers()
        logger.error("unhandled error in %s", type(self).__name__, exc_info=exc, extra={"event": "http_error"})
        return 500, error_object("Internal server error.", status=500, code="internal_error"), []

    @property
    def method(self) -> str:
        return self.scope["method"]

    @property
    def route(self) -> Any:
        return self.scope.get("sluice.route")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The parts that the path captured."""
        return self.scope.get("url_route", {}).get("kwargs", {})

    def header(self, name: str) -> str | None:
        """The first value of a request header."""
        wanted = name.lower().encode()
        return next((v.decode("latin-1") for k, v in self.scope["headers"] if k == wanted), None)

    # --- replies ----------------------------------------------------------------------

    async def send_json(self, status: int, obj: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A complete JSON reply."""
        await self.send_bytes(status, msgspec.json.encode(obj), [(b"content-type", b"application/json"), *headers])

    async def send_bytes(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A complete reply of any kind."""
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.finish(body)

    async def start_sse(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send the status line and the headers of an event stream, at once."""
        self.is_sse = True
        await self._start(200, [*SSE_HEADERS, *headers])
        # Some servers hold the headers back until there is a body.
        await self.send({"type": "http.response.body", "body": b"", "more_body": True})

    async def send_sse_bytes(self, data: bytes) -> None:
        """Send complete events, LF framed. Waits while the client's connection is full."""
        # Once per token of every stream: past Channels' own ``send``, which only passes it on.
        await self.base_send({"type": "http.response.body", "body": data, "more_body": True})

    async def ping(self) -> None:
        """A comment that keeps proxies from closing a silent stream; clients ignore it."""
        await self.send_sse_bytes(b": ping\n\n")

    async def finish(self, body: bytes = b"") -> None:
        """Send the last body message. The exchange ends with it."""
        if not self.finished:
            self.finished = True
            await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers_sent = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    # --- running ----------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        self.base_send = send
        self.request_id = scope.get("sluice.request_id") or logs.new_request_id()
        live.enter(self)
        try:
            body = await self._admit(receive)
            await self._run(body, receive)
        except Disconnected:
            pass
        except Exception as exc:  # noqa: BLE001 - every refusal becomes a reply
            await self._reply_error(exc)
        finally:
            live.leave(self)

    async def _admit(self, receive: Any) -> bytes:
        """Method, access, drain, body: in this order, each before the next costs anything."""
        route = self.route
        if route is not None:
            allowed = set(route.allow.split(", "))
            if self.method not in allowed:
                message = f"{self.method[:20]} is not allowed here."
                headers = [(b"allow", route.allow.encode())]
                raise HttpError(405, message, code="method_not_allowed", headers=headers)
        self.principal = await self.authorize()
        if self.method == "OPTIONS":
            return b""
        if route is not None and route.inference:
            self.refuse_if_draining()
        return await self._read_body(receive)

    def refuse_if_draining(self) -> None:
        """Raise the 503 for new inference where the server accepts none."""
        from sluice import runtime

        if runtime.status.refusing:
            raise draining(runtime.status.retry_after())

    async def _read_body(self, receive: Any) -> bytes:
        settings = conf.server_config()
        limit = self.max_body_bytes or settings.max_body_bytes
        coding = self.header("content-encoding") or "identity"
        if coding.strip().lower() != "identity":
            raise HttpError(
                415, "Send the body uncompressed: no Content-Encoding is read.", code="unsupported_encoding"
            )
        length = self.header("content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(settings.read_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise HttpError(
                408,
                f"The body did not arrive within {settings.read_timeout:g} s.",
                code="body_timeout",
                headers=[(b"connection", b"close")],
            ) from None

    async def _run(self, body: bytes, receive: Any) -> None:
        """Run the handler as a task until it ends or the client goes, whichever is first."""
        loop = asyncio.get_running_loop()
        task = self._task = loop.create_task(self._guarded(body), name=f"handler {self.request_id}")
        gone = loop.create_task(_until_disconnect(receive), name=f"disconnect {self.request_id}")
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also on the way out of a cancellation: cancel what is left and wait until it has cleaned up.
            await cancel_and_wait(task, gone)
        if not task.cancelled() and (exc := task.exception()) is not None:
            raise exc

    async def _guarded(self, body: bytes) -> None:
        try:
            if self.method == "OPTIONS":
                headers = [(b"allow", (self.route.allow if self.route else "OPTIONS").encode())]
                await self._start(204, headers)
            else:
                await self.handle(body)
        except asyncio.CancelledError:
            if not self.shutting_down:
                raise
            # The server ends: say so to a client that is still there.
            if self.finished:
                return
            if self.headers_sent:
                await self.on_stream_error(None)
            else:
                from sluice import runtime

                await self._reply_error(draining(runtime.status.retry_after()))
        except Exception as exc:
            # The edge of the handler's task: a reply, or the end of the answer that says it was broken off.
            if not self.headers_sent:
                await self._reply_error(exc)
                return
            logger.error("answer broken off in %s", type(self).__name__, exc_info=exc, extra={"event": "sse_error"})
            if not self.finished:
                await self.on_stream_error(exc)
        if not self.headers_sent:
            await self._reply_error(RuntimeError("the handler sent nothing"))
        await self.finish()

    async def _reply_error(self, exc: Exception) -> None:
        if self.headers_sent:
            raise exc
        status, payload, headers = self.error_reply(exc)
        await self.send_json(status, payload, headers)

    async def shut_down(self) -> None:
        """End the exchange because the server ends: an error event, or a 503 where nothing was sent yet."""
        self.shutting_down = True
        if self._task is not None:
            await cancel_and_wait(self._task)


def _too_large(limit: int) -> HttpError:
    return HttpError(
        413,
        f"The body is larger than {limit} bytes.",
        code="body_too_large",
        headers=[(b"connection", b"close")],
    )


async def _until_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
