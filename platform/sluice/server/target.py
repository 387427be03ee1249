"""What a request asks for and by way of whom: its target and the host (RFC 9112, 3.2), and what a proxy adds."""

from __future__ import annotations

import re
from typing import Any

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)((?:[/?][^#]*)?)", re.IGNORECASE)
_SCHEME = re.compile(rb"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def settle(request: Any) -> str | None:
    """Give a request of Twisted's the path and the one host that it is for.

    A target may be a whole address, as clients send it to a proxy: its host then counts instead of
    the header, and its path and query are those of any other request.

    Returns:
        What is wrong with it; ``None`` where nothing is.
    """
    hosts = request.requestHeaders.getRawHeaders(b"host", [])
    if len(hosts) > 1 or (not hosts and request.clientproto == b"HTTP/1.1"):
        return "A request has exactly one Host header."
    if _SCHEME.match(request.uri) is None:
        return None
    found = _ABSOLUTE.fullmatch(request.uri)
    if found is None:
        return "The request's target is no http address with a host, a path and a query alone."
    host, rest = found.groups()
    request.uri = rest if rest.startswith(b"/") else b"/" + rest
    request.path = request.uri.partition(b"?")[0]
    request.requestHeaders.setRawHeaders(b"host", [host])
    return None


def believe_nearest(request: Any) -> None:
    """Leave in ``X-Forwarded-For`` the one address that the proxy in front of this server has put there: the last.

    A proxy adds the caller's address behind what the caller has sent, as a further entry or a further line, and
    Daphne believes the first: that would be any address the caller likes to have.
    """
    if lines := request.requestHeaders.getRawHeaders(b"x-forwarded-for"):
        last = lines[-1].rpartition(b",")[2].strip()
        # Never without: what came through a proxy must not seem to come from this machine.
        address = last if last and last.isascii() else b"unknown"
        request.requestHeaders.setRawHeaders(b"x-forwarded-for", [address])
    if not b"".join(request.requestHeaders.getRawHeaders(b"x-forwarded-proto", [])).isascii():
        request.requestHeaders.removeHeader(b"x-forwarded-proto")  # no proxy's; Daphne would fail on it
