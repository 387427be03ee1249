"""What a request asks for: the forms of a request's target, and the host it is for (RFC 9112, 3.2)."""

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
