"""Whether a WebSocket handshake comes from a page of this site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.http.request import is_same_domain, split_domain_port


def header(scope: Mapping[str, Any], name: bytes) -> str:
    """All values of a header, joined as HTTP joins them; ``""`` without it."""
    joiner = "; " if name == b"cookie" else ", "
    return joiner.join(v.decode("latin-1") for k, v in scope.get("headers", []) if k.lower() == name)


def origin_allowed(scope: Mapping[str, Any], *, with_key: bool = False) -> bool:
    """Whether the ``Origin`` of a handshake is ours: same host, or one of CSRF_TRUSTED_ORIGINS.

    Browsers send cookies along with cross-site handshakes and always say where
    the page came from. A missing ``Origin`` therefore means "no browser", which
    is fine with an API key (``with_key``) and never with a cookie or a ticket.
    ``null`` (sandboxed frames, files) is nobody's origin.
    """
    values = [v for k, v in scope.get("headers", []) if k.lower() == b"origin"]
    if not values:
        return with_key
    if len(values) > 1:
        return False
    try:
        origin = values[0].decode("ascii").lower()
        parts = urlsplit(origin)
        port = parts.port
    except (UnicodeDecodeError, ValueError):
        return False
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    return _same_host(scope, parts.scheme, parts.netloc, port) or _trusted(origin, parts.scheme, parts.netloc)


def _same_host(scope: Mapping[str, Any], scheme: str, netloc: str, port: int | None) -> bool:
    own = {"ws": "http", "wss": "https"}.get(scope.get("scheme", ""), scope.get("scheme", "http"))
    request = ASGIRequest({"method": "GET", "query_string": b"", **scope, "scheme": own}, None)  # type: ignore[arg-type]
    try:
        host = request.get_host().lower()  # checked against ALLOWED_HOSTS; knows USE_X_FORWARDED_HOST
    except DisallowedHost:
        return False
    if request.is_secure() and scheme != "https":
        return False  # a page sent in the clear may be anybody's
    # A page over https may meet us over plain http, behind a proxy that ends TLS and
    # does not say so; the default port is then the page's, not ours.
    default = 443 if scheme == "https" else 80
    host_name, host_port = split_domain_port(host)
    name, _ = split_domain_port(netloc)
    return name == host_name and (port or default) == int(host_port or default)


def _trusted(origin: str, scheme: str, netloc: str) -> bool:
    for trusted in settings.CSRF_TRUSTED_ORIGINS:
        if "*" not in trusted:
            if origin == trusted.lower().rstrip("/"):
                return True
            continue
        parts = urlsplit(trusted)
        if parts.scheme == scheme and is_same_domain(netloc, parts.netloc.lstrip("*")):
            return True
    return False
