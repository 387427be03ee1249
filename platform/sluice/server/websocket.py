"""WebSocket connections: Daphne's protocol with a write gate, a bounded queue and fair pings."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol
from twisted.internet import reactor

from inference import metrics
from sluice.server.gate import WriteGate

#: A pong that the event loop was too busy to read gets so long to be found, seconds.
PONG_GRACE = 1.0


class SluiceWebSocketProtocol(WebSocketProtocol):
    """One WebSocket connection."""

    #: The refusal to answer with; a handshake may also fail before it has got as far as the application.
    _denial: tuple[int, dict[str, str]] | None = None
    _denial_body = b""

    def onConnect(self, request: Any) -> Any:
        self.gate = WriteGate()
        self._reading_paused = False
        self._waiting: deque[int] = deque()
        self._waiting_bytes = 0
        # Until now the HTTP channel of this connection was told when it is full.
        self.transport.unregisterProducer()
        self.transport.registerProducer(self.gate, True)
        # Every message is one that somebody waits for.
        self.transport.prompt = True
        return super().onConnect(request)

    def connectionLost(self, *args: Any) -> None:
        if hasattr(self, "gate"):
            self.gate.stopProducing()
        self.factory.server_class.closed(self.transport)
        super().connectionLost(*args)

    # --- receiving --------------------------------------------------------------------

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        super().onMessage(payload, isBinary)
        self._waiting.append(len(payload))
        self._waiting_bytes += len(payload)
        config = self.server.config
        behind = len(self._waiting) > config.ws_queue or self._waiting_bytes > config.ws_max_message_bytes
        if not self._reading_paused and behind:
            # The consumer is behind: let TCP tell the client, instead of keeping it all.
            self._reading_paused = True
            self.transport.pauseProducing()

    def message_taken(self) -> None:
        """The consumer has taken a message of the client from the queue."""
        if self._waiting:
            self._waiting_bytes -= self._waiting.popleft()
        config = self.server.config
        few = len(self._waiting) < config.ws_queue // 2 and self._waiting_bytes <= config.ws_max_message_bytes // 2
        if self._reading_paused and few:
            self._reading_paused = False
            self.transport.resumeProducing()

    def onPing(self, payload: bytes) -> None:
        # Who reads nothing gets no pongs, either: they would pile up here.
        if not self.gate.shut:
            super().onPing(payload)

    # --- replying ---------------------------------------------------------------------

    def handle_reply(self, message: Any) -> None:
        kind = message.get("type")
        if kind == "websocket.close" and self.state == self.STATE_OPEN:
            self.close_with(message.get("code") or 1000, message.get("reason") or "")
        elif kind in ("websocket.send", "websocket.close") and self.state in (self.STATE_CLOSING, self.STATE_CLOSED):
            pass  # nobody reads it; the consumer is about to read its disconnect
        elif kind == "websocket.http.response.start":
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in message.get("headers", [])}
            self._denial = (message["status"], headers)
        elif kind == "websocket.http.response.body":
            self._denial_body += message.get("body", b"")
            if not message.get("more_body", False) and self.state == self.STATE_CONNECTING:
                self.serverReject()
        else:
            super().handle_reply(message)

    def close_with(self, code: int, reason: str) -> None:
        """Start the closing handshake with any code, also those that a user may not choose."""
        encoded = reason.encode()[:120] if reason.isascii() else b""
        self.sendCloseFrame(code=code, reasonUtf8=encoded or None)

    def serverReject(self) -> None:
        if hasattr(self, "handshake_deferred"):
            super().serverReject()

    def failHandshake(self, reason: str, code: int = 400, responseHeaders: Any = None) -> None:
        headers: dict[str, str] = {}
        if self._denial is not None:
            code, headers = self._denial
        headers = {"content-length": "0", "connection": "close", **headers}
        super().failHandshake(reason, code, list(headers.items()))

    def sendHttpErrorResponse(self, code: int, reason: str, responseHeaders: Any = None) -> None:
        super().sendHttpErrorResponse(code, reason, responseHeaders)
        if self._denial_body:
            self.sendData(self._denial_body)

    def application_ended(self, exc: BaseException | None) -> None:
        """The application has returned; a socket that it left open is closed."""
        if self.state == self.STATE_CONNECTING:
            if self._denial is None:
                self._denial = (500 if exc else 403, {})
            self.serverReject()
        elif self.state == self.STATE_OPEN:
            self.close_with(1011 if exc else 1000, "internal error" if exc else "")

    def abort(self) -> None:
        """Cut the connection, dropping what is unsent."""
        self.transport.abortConnection()

    # --- pings ------------------------------------------------------------------------

    def check_timeouts(self) -> None:
        if self.state == self.STATE_CONNECTING:
            if self.duration() > self.server.websocket_connect_timeout:
                self.serverReject()
        elif (
            self.state == self.STATE_OPEN
            # A ping per interval without a word *from* the client; what we send says nothing about it.
            # Never a second one while the first is open: its pong would no longer count.
            and self.autoPingPending is None
            and time.time() - self.last_ping > self.server.ping_interval
        ):
            self._sendAutoPing()
            self.last_ping = time.time()

    def onAutoPingTimeout(self) -> None:
        """No pong in time. Look again shortly: it may lie unread because this process was busy."""
        waiting_for = self.autoPingPending
        self.autoPingTimeoutCall = None
        reactor.callLater(PONG_GRACE, self._drop_unless_answered, waiting_for)

    def _drop_unless_answered(self, waiting_for: bytes | None) -> None:
        if waiting_for is not None and self.autoPingPending == waiting_for and self.state == self.STATE_OPEN:
            self.server.dead_peers += 1
            metrics.DEAD_PEERS.inc()
            super().onAutoPingTimeout()


class SluiceWebSocketFactory(WebSocketFactory):
    protocol = SluiceWebSocketProtocol
