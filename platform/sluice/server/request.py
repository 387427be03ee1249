"""One HTTP exchange: Daphne's request with a limit for its body, a write gate and a certain end."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from daphne.http_protocol import WebRequest
from twisted.internet import reactor

from sluice.consumers.errors import error_body
from sluice.server import target
from sluice.server.gate import WriteGate
from sluice.server.refusal import LINGER

_PHRASES = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}


class SluiceRequest(WebRequest):
    """One HTTP exchange on a connection."""

    def __init__(self, channel: Any, queued: Any = False) -> None:
        # Forms are for Django to parse: Twisted would do it here, on the event loop, for every body.
        super().__init__(channel, queued, parsePOSTFormSubmission=False)
        self.gate = WriteGate()
        self._received = 0

    def process(self) -> Any:
        # Daphne would believe any client about where the site is mounted.
        self.requestHeaders.removeHeader(b"daphne-root-path")
        if wrong := target.settle(self):
            self.basic_error(400, b"Bad Request", wrong)
            return None
        if self.server.config.behind_proxy:
            target.believe_nearest(self)
        protocols = b",".join(self.requestHeaders.getRawHeaders(b"sec-websocket-protocol", []))
        if not protocols.isascii() or b"%" in protocols:  # it would also decode what is not encoded
            self.basic_error(400, b"Bad Request", "Invalid characters in Sec-WebSocket-Protocol.")
            return None
        return super().process()

    def handleContentChunk(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > self.server.config.max_body_bytes:
            self.channel.refuse_body()
        elif not self.channel.refused:
            super().handleContentChunk(data)

    def handle_reply(self, message: Any) -> None:
        if self.finished or self.channel is None:
            return
        streams = message.get("type") == "http.response.body" and message.get("more_body", False)
        if streams and self.chunked:
            # Once per token of every stream: a chunk, and nothing else. The headers have gone out.
            if data := message.get("body"):
                self.sentLength += len(data)
                self.channel.write(b"%x\r\n%b\r\n" % (len(data), data))
            return
        starting = message.get("type") == "http.response.start" and not self._response_started
        if hasattr(self.channel.transport, "prompt"):
            self.channel.transport.prompt = streams
        super().handle_reply(message)
        if starting:
            self.registerProducer(self.gate, True)
            if self.server.status.leaving or self.channel.spare:
                self.responseHeaders.setRawHeaders(b"connection", [b"close"])
            values = self.responseHeaders.getRawHeaders(b"connection") or []
            if any(value.lower() == b"close" for value in values):
                self.channel.persistent = 0

    def setResponseCode(self, code: int, message: bytes | None = None) -> None:
        # Twisted's own table of phrases ends before 429.
        if message is None:
            message = _PHRASES.get(code)
        super().setResponseCode(code, message)

    def finish(self) -> None:
        if self.producer is not None and self.channel is not None:
            self.unregisterProducer()
        self.gate.stopProducing()
        super().finish()

    def connectionLost(self, reason: Any) -> None:
        self.gate.stopProducing()
        super().connectionLost(reason)

    def application_ended(self, exc: BaseException | None) -> None:
        """The application has returned. What it left open, no one will finish: 500, or cut the connection."""
        if self.finished or self.channel is None:
            return
        if self._response_started:
            # Without its end, so that the client can tell; what was sent before still goes out.
            transport = self.channel.transport
            self.channel.loseConnection()
            reactor.callLater(LINGER, transport.abortConnection)
        else:
            self.basic_error(500, b"Internal Server Error", "Internal server error.")

    def abort(self) -> None:
        """Cut the connection, dropping what is unsent."""
        if self.channel is not None:
            self.channel.transport.abortConnection()

    def basic_error(self, status: int, status_text: bytes, body: str) -> None:
        """Daphne's own errors, as JSON like all others."""
        if self._response_started or self.channel is None:
            return
        content = error_body(body, status=status, code=status_text.decode("ascii").lower().replace(" ", "_"))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        self.handle_reply({"type": "http.response.start", "status": status, "headers": headers})
        self.handle_reply({"type": "http.response.body", "body": content})
