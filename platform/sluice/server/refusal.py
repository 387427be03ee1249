"""Answers that no application gives: whole, and the last on their connection."""

from __future__ import annotations

from twisted.internet.protocol import Protocol

from sluice.consumers.errors import error_body

TOO_MANY = "Too many connections."
#: How long a refused client may go on sending what nobody reads, so that it gets to read the refusal.
LINGER = 2.0


def raw_response(status: int, reason: bytes, body: bytes, retry_after: int | None = None) -> bytes:
    """A whole JSON response that closes the connection."""
    lines = [
        b"HTTP/1.1 %d %s" % (status, reason),
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
    ]
    if retry_after is not None:
        lines.append(b"Retry-After: %d" % retry_after)
    return b"\r\n".join([*lines, b"", body])


class Full(Protocol):
    """Says that there are too many connections, and closes."""

    def connectionMade(self) -> None:
        body = error_body(TOO_MANY, status=503, code="too_many_connections")
        self.transport.write(raw_response(503, b"Service Unavailable", body, retry_after=1))
        self.transport.loseConnection()
