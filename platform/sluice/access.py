"""The access rules of the route table, decided in one place for HTTP and WebSocket."""

from __future__ import annotations

import hmac
import logging
from typing import Any

from django.db import DatabaseError

from sluice.conf import server_config
from sluice.consumers.errors import HttpError

logger = logging.getLogger(__name__)

_MISSING = "No API key. Send it as 'Authorization: Bearer YOUR_KEY'."
_UNKNOWN = "This API key (or WebSocket ticket) is unknown, expired or revoked. Send 'Authorization: Bearer YOUR_KEY'."

#: What proxies add. The callers of a proxy on this machine are not on this machine.
_PROXIED = {b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"}


async def check(rule: str, scope: Any) -> Any:
    """Who is calling, where the rule lets them.

    Returns:
        The :class:`apps.accounts.principal.Principal`; ``None`` on a public route.

    Raises:
        HttpError: 401 unknown, 403 known but not allowed, 503 the database is away.
    """
    if rule == "public" or (rule == "metrics" and _may_scrape(scope)):
        return None
    from apps.accounts.auth import authenticate

    try:
        principal = await authenticate(scope)
    except DatabaseError as exc:
        logger.error("cannot check who is calling: %s", type(exc).__name__)
        raise HttpError(503, "The account database does not answer.", code="unavailable", retry_after=2) from exc
    if principal is None:
        problem = scope.get("auth_problem", "missing")
        if problem == "csrf":
            raise HttpError(403, "The CSRF token is missing or wrong.", code="csrf_failed")
        if problem == "origin":
            raise HttpError(403, "This origin may not connect.", code="origin_not_allowed")
        raise HttpError(
            401,
            _UNKNOWN if problem == "invalid" else _MISSING,
            code="invalid_api_key",
            headers=[(b"www-authenticate", b'Bearer realm="sluice"')],
        )
    if rule == "session" and principal.via != "session":
        raise HttpError(403, "This needs a signed-in user.", code="session_required")
    if rule in ("staff", "metrics") and not principal.is_staff:
        raise HttpError(403, "This needs staff rights.", code="permission_denied")
    return principal


def _may_scrape(scope: Any) -> bool:
    """Whether the settings let this caller read the metrics without an account."""
    config = server_config()
    headers = dict(scope.get("headers", []))
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    expected = config.metrics_token.encode()
    if expected and scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), expected):
        return True
    if config.metrics_access == "loopback":
        client = scope.get("client") or ("",)
        local = str(client[0]) in ("127.0.0.1", "::1")
        return local and not headers.keys() & _PROXIED
    return config.metrics_access == "public"
