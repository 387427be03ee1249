"""HTTP/1.1 connections: limits and deadlines for what comes in, and how many there may be."""

from __future__ import annotations

from typing import Any

from daphne.http_protocol import HTTPFactory
from twisted.internet import reactor
from twisted.web import http

from sluice.consumers.errors import error_body
from sluice.routes import OWN
from sluice.server import sockets
from sluice.server.refusal import LINGER, TOO_MANY, Full, raw_response
from sluice.server.request import SluiceRequest

#: Bytes of further requests that a client may have sent while it does not read the answer to the one before.
MOST_AHEAD = 64 * 1024
#: Connections above the limit on which what operators ask is answered: were a full server's liveness refused,
#: Kubernetes would kill it, with every stream in it.
SPARE = 16
#: Seconds in which such a connection has to ask.
SPARE_TIMEOUT = 2.0
_FOR_OPERATORS = frozenset(route.template.encode() for route in OWN)
#: Seconds that a connection without any request yet stays open when idle ones are closed. Without them a
#: request that arrives as the drain begins finds its new connection closed, and its client has no answer.
FIRST_REQUEST = 0.5
#: Characters of a Content-Length; what is longer has not been written by a client of good will.
LENGTH_CHARS = 100


class SluiceChannel(http.HTTPChannel):
    """One HTTP connection.

    The headers of a request, and again its body, must be complete within
    ``read_timeout``, however busily the client trickles; both have a size limit,
    checked before anything is kept.
    """

    factory: Any

    def __init__(self) -> None:
        super().__init__()
        self.spare = False
        self.refused = False
        self.busy = False
        self._deadline: Any = None
        self._head_bytes = 0
        self._ahead = 0
        self._full = False
        self._new = True
        self._first: Any = None

    # --- life -------------------------------------------------------------------------

    def connectionMade(self) -> None:
        self.server = self.factory.server
        config = self.server.config
        self.totalHeadersSize = 2 * config.max_header_bytes  # ours answers first, with 431
        self.maxHeaders = config.max_headers
        self.transport.bufferSize = config.high_water_bytes
        if hasattr(self.transport, "socket"):
            sockets.tune(self.transport.socket, config.dead_peer_timeout)
        super().connectionMade()
        self.server.opened(self.transport, self)

    def connectionLost(self, reason: Any) -> None:
        self._stop_clock()
        if self._first is not None:
            self._first.cancel()
        self.server.closed(self.transport)
        super().connectionLost(reason)

    @property
    def idle(self) -> bool:
        """No request is being received or answered."""
        return not self.busy and not self.requests and self._deadline is None

    def close_if_idle(self) -> None:
        """Close a keep-alive connection, unless a request has just come in on it.

        One on which nothing ever came was opened for a request that is on its way: it has
        ``FIRST_REQUEST`` seconds for it.
        """
        if not self.idle or sockets.has_unread(self.transport.socket):
            return
        if not self._new:
            self.loseConnection()
        elif self._first is None:
            self._first = reactor.callLater(FIRST_REQUEST, self._close_unused)

    def _close_unused(self) -> None:
        self._first = None
        if self.server.status.leaving and self.idle and not sockets.has_unread(self.transport.socket):
            self.loseConnection()

    # --- receiving --------------------------------------------------------------------

    def dataReceived(self, data: bytes) -> None:
        self._new = False
        if self.refused:
            return
        if not self.busy:
            self._start_clock()
        super().dataReceived(data)

    def lineReceived(self, line: bytes) -> None:
        if self.refused:
            return
        self._start_clock()
        self._head_bytes += len(line) + 2
        if self._head_bytes > self.server.config.max_header_bytes:
            self._refuse_head()
            return
        super().lineReceived(line)

    def lineLengthExceeded(self, line: bytes) -> None:
        self._refuse_head()

    def rawDataReceived(self, data: bytes) -> None:
        if self.refused:
            return
        if self.busy:
            # Twisted keeps the next requests for later, and stops reading only where the client reads.
            self._ahead += len(data)
            if self._full and self._ahead > MOST_AHEAD:
                self.server.refusals["asks_without_reading"] += 1
                self.transport.abortConnection()
                return
        super().rawDataReceived(data)

    def headerReceived(self, line: bytes) -> bool:
        if self.refused:
            return False
        if self._receivedHeaderCount >= self.maxHeaders:
            self._refuse_head()
            return False
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length" and len(value) > LENGTH_CHARS:
            self._refuse(400, b"Bad Request", "The Content-Length is no length.", "bad_request")
            return False
        return super().headerReceived(line)

    def allHeadersReceived(self) -> None:
        self._stop_clock()
        if self.spare and self._path.partition(b"?")[0] not in _FOR_OPERATORS:
            self._refuse(503, b"Service Unavailable", TOO_MANY, "too_many_connections", retry_after=1)
            return
        if self.length is not None and self.length > self.server.config.max_body_bytes:
            self.refuse_body()
            return
        super().allHeadersReceived()
        if self.length != 0:
            self._start_clock()

    def allContentReceived(self) -> None:
        if self.refused:
            return
        self._stop_clock()
        self._head_bytes = 0
        self.busy = True
        super().allContentReceived()

    def requestDone(self, request: Any) -> None:
        self.busy = False
        self._ahead = 0
        super().requestDone(request)

    # --- the transport is full, or free again -----------------------------------------

    def pauseProducing(self) -> None:
        self._full = True
        super().pauseProducing()

    def resumeProducing(self) -> None:
        self._full = False
        super().resumeProducing()

    # --- refusing ---------------------------------------------------------------------

    def _respondToBadRequestAndDisconnect(self) -> None:
        # Twisted's answer to what it can not parse: a bare status line, and some of the rest is read on.
        self._refuse(400, b"Bad Request", "The request is not well-formed HTTP.", "bad_request")

    def refuse_body(self) -> None:
        limit = self.server.config.max_body_bytes
        self._refuse(413, b"Content Too Large", f"The body is larger than {limit} bytes.", "body_too_large")

    def _refuse_head(self) -> None:
        self._refuse(431, b"Request Header Fields Too Large", "The headers are too large.", "headers_too_large")

    def _too_slow(self) -> None:
        self._deadline = None
        seconds = self.server.config.read_timeout
        self._refuse(408, b"Request Timeout", f"The request did not arrive within {seconds:g} s.", "read_timeout")

    def _refuse(self, status: int, reason: bytes, message: str, code: str, *, retry_after: int | None = None) -> None:
        """Answer before the request is complete, and close without losing the answer.

        Closing at once while the client still sends would reset the connection and
        often destroy the answer on its way; so only our side is closed first.
        """
        if self.refused:
            return
        self.refused = True
        self._stop_clock()
        self.setTimeout(None)
        self.server.refusals[code] += 1
        body = error_body(message, status=status, code=code)
        self.transport.write(raw_response(status, reason, body, retry_after))
        if hasattr(self.transport, "loseWriteConnection"):
            self.transport.loseWriteConnection()
        transport = self.transport
        reactor.callLater(LINGER, transport.abortConnection)

    def _start_clock(self) -> None:
        if self._deadline is None and not self.busy and not self.refused:
            self._deadline = reactor.callLater(self.server.config.read_timeout, self._too_slow)

    def _stop_clock(self) -> None:
        call, self._deadline = self._deadline, None
        if call is not None and call.active():
            call.cancel()


class SluiceHTTPFactory(HTTPFactory):
    """Builds channels, up to the limit of connections."""

    protocol = SluiceChannel

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.timeOut = server.config.idle_timeout

    def buildProtocol(self, addr: Any) -> Any:
        above = len(self.server.transports) - self.server.config.max_connections
        if above >= SPARE:
            self.server.refusals["too_many_connections"] += 1
            return Full()
        channel = super().buildProtocol(addr)
        if above >= 0:
            channel.spare = True
            channel.timeOut = min(self.timeOut, SPARE_TIMEOUT)
        channel.requestFactory = SluiceRequest
        return channel
