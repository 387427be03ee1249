"""The base of WebSocket consumers: it receives while its tasks run, and owns them all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from channels.consumer import AsyncConsumer

from sluice import access, logs
from sluice.consumers import live
from sluice.consumers.errors import HttpError, draining
from sluice.consumers.tasks import cancel_and_wait, cancel_once

logger = logging.getLogger("sluice.websocket")

GOING_AWAY = 1012
INTERNAL_ERROR = 1011


class Refuse(Exception):
    """Raised by :meth:`StreamingWebSocketConsumer.authorize` to refuse the handshake.

    Args:
        code: close code (4000-4999) for servers and clients that show it.
        status: HTTP status of the refused handshake, where the server can say it.
        headers, body: of that answer; the body is JSON.
    """

    def __init__(
        self,
        code: int = 4403,
        status: int = 403,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
    ) -> None:
        super().__init__(f"handshake refused with {status}")
        self.code = code
        self.status = status
        self.headers = list(headers)
        self.body = body

    @classmethod
    def saying(cls, error: HttpError, code: int | None = None) -> Refuse:
        """The refusal that answers the handshake as ``error`` would answer a request."""
        body = msgspec.json.encode(error.payload())
        return cls(code or 4000 + error.status, error.status, headers=error.headers(), body=body)


class StreamingWebSocketConsumer(AsyncConsumer):
    """Serves one WebSocket.

    Each message is handled by a short coroutine (:meth:`on_text`, :meth:`on_bytes`);
    anything longer is a task started with :meth:`spawn` under a key, cancelled with
    :meth:`cancel`, and cancelled and awaited for when the socket goes.
    """

    #: Offered to clients that ask for it; the first that both know is chosen.
    subprotocols: tuple[str, ...] = ()
    #: New sockets are refused while the server drains.
    inference = True
    #: A drain waits for its tasks. ``False`` for endless feeds of pages.
    drain_waits = True

    def __init__(self) -> None:
        self.principal: Any = None
        self.open = False
        self.shutting_down = False
        self.tasks: dict[Any, asyncio.Task[Any]] = {}

    # --- for subclasses ---------------------------------------------------------------

    async def authorize(self) -> Any:
        """Who is calling; raises :class:`Refuse` or :class:`HttpError` before the socket is accepted."""
        route = self.scope.get("sluice.route")
        return await access.check(route.access if route else "key", self.scope)

    async def on_open(self) -> None:
        """The socket has been accepted."""

    async def on_text(self, text: str) -> None:
        """A text message. Must be quick: the next message waits for it."""

    async def on_bytes(self, data: bytes) -> None:
        """A binary message. The default closes with 1003 (unsupported data)."""
        await self.close(1003, "binary messages are not supported")

    async def on_error(self, exc: Exception) -> None:
        """A message handler raised. The default closes with 1011."""
        await self.close(INTERNAL_ERROR, "internal error")

    async def on_close(self, code: int) -> None:
        """The socket has gone and every task of it has ended."""

    # --- sending ----------------------------------------------------------------------

    async def send_text(self, text: str) -> None:
        """Send a text message. Waits while the client's connection is full."""
        if self.open:
            await self.send({"type": "websocket.send", "text": text})

    async def send_json(self, obj: Any) -> None:
        await self.send_text(msgspec.json.encode(obj).decode())

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the socket; harmless when it is closed."""
        if self.open:
            self.open = False
            await self.send({"type": "websocket.close", "code": code, "reason": reason})

    # --- tasks ------------------------------------------------------------------------

    def spawn(self, key: Any, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task of this socket under ``key``.

        Raises:
            KeyError: a task of that key is running.
        """
        if key in self.tasks:
            coro.close()
            raise KeyError(key)
        task = asyncio.get_running_loop().create_task(coro, name=f"socket {self.request_id} {key}")
        self.tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def cancel(self, key: Any) -> bool:
        """Ask a task to stop; ``False`` where none of that key runs."""
        task = self.tasks.get(key)
        return task is not None and cancel_once(task)

    @property
    def idle(self) -> bool:
        """No task is running: a drain closes the socket at once."""
        return not self.tasks

    def _ended(self, key: Any, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(key, None)
        if not task.cancelled() and (exc := task.exception()) is not None:
            logger.error("task %s of a socket failed", key, exc_info=exc, extra={"event": "socket_error"})
        from sluice import runtime

        if self.idle and self.open and runtime.status.refusing:
            # The last answer of a draining server has gone out.
            closing = asyncio.get_running_loop().create_task(self.close_for_restart())
            self._closing = closing  # keep a reference until it is done

    async def close_for_restart(self) -> None:
        await self.close(GOING_AWAY, "server restarts")

    async def shut_down(self) -> None:
        """End the socket because the server ends: its tasks first, then close 1012."""
        self.shutting_down = True
        await self._cancel_all()
        await self.close_for_restart()

    async def _cancel_all(self) -> None:
        await cancel_and_wait(*self.tasks.values())

    # --- running ----------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        self.base_send = send
        self.request_id = scope.get("sluice.request_id") or logs.new_request_id()
        if (await receive())["type"] != "websocket.connect" or not await self._handshake():
            return
        live.enter(self)
        code = 1006
        try:
            await self.on_open()
            code = await self._receive_all(receive)
        finally:
            self.open = False
            live.leave(self)
            await self._cancel_all()
            await self.on_close(code)

    async def _handshake(self) -> bool:
        from sluice import runtime

        def refuse_if_draining() -> None:
            if self.inference and runtime.status.refusing:
                raise Refuse.saying(draining(runtime.status.retry_after()), GOING_AWAY)

        try:
            refuse_if_draining()
            self.principal = await self.authorize()
            # Again: a drain that has closed the idle sockets meanwhile would wait for this one.
            refuse_if_draining()
        except Refuse as exc:
            await self._refuse(exc)
            return False
        except HttpError as exc:
            await self._refuse(Refuse.saying(exc))
            return False
        offered = self.scope.get("subprotocols", [])
        chosen = next((p for p in self.subprotocols if p in offered), None)
        self.open = True
        await self.send({"type": "websocket.accept", "subprotocol": chosen})
        return True

    async def _refuse(self, refusal: Refuse) -> None:
        if "websocket.http.response" in self.scope.get("extensions", {}):
            headers = [(b"content-length", str(len(refusal.body)).encode()), *refusal.headers]
            if refusal.body:
                headers.append((b"content-type", b"application/json"))
            start = {"type": "websocket.http.response.start", "status": refusal.status, "headers": headers}
            await self.send(start)
            await self.send({"type": "websocket.http.response.body", "body": refusal.body})
        else:
            await self.send({"type": "websocket.close", "code": refusal.code})

    async def _receive_all(self, receive: Callable[[], Any]) -> int:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return message.get("code") or 1005
            if not self.open:
                continue
            try:
                if message.get("text") is not None:
                    await self.on_text(message["text"])
                else:
                    await self.on_bytes(message.get("bytes") or b"")
            except Exception as exc:
                # The edge of one message: the socket and its other streams go on.
                logger.error("message not handled", exc_info=exc, extra={"event": "socket_error"})
                with contextlib.suppress(ConnectionError):
                    await self.on_error(exc)
