"""Authentication of ASGI scopes: API keys, Django sessions, WebSocket tickets.

One answer for every route and transport. The rules:

* ``Authorization: Bearer <key>`` decides alone where the header is present: a
  wrong key is refused even beside a valid session cookie.
* A key is never read from the query string, where logs would keep it.
* A session counts for a browser only: an unsafe HTTP method needs Django's CSRF
  token, a WebSocket handshake an ``Origin`` of this site.
* A WebSocket may instead carry a single-use ticket, as the subprotocol
  ``sluice.ticket.<token>`` or as ``?ticket=<token>``.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import logging
from collections.abc import MutableMapping
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError
from django.http import HttpRequest, parse_cookie
from django.middleware.csrf import CsrfViewMiddleware

from apps.accounts import keyformat
from apps.accounts.keycache import cache
from apps.accounts.models import ApiKey, UserLimits
from apps.accounts.origin import header, origin_allowed
from apps.accounts.principal import Principal
from apps.accounts.quota import Quota, quota_for
from apps.accounts.tickets import issue_ticket, redeem_ticket, session_user

__all__ = ["Principal", "authenticate", "flush", "issue_ticket", "origin_allowed", "redeem_ticket", "renewed"]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

LAST_USED_EVERY = timedelta(minutes=1)
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
TICKET_PROTOCOL = "sluice.ticket."

_lookups: dict[str, asyncio.Task[Principal | None]] = {}
_background: set[asyncio.Task[None]] = set()


async def authenticate(scope: Scope) -> Principal | None:
    """The caller of an ``http`` or ``websocket`` scope; ``None`` if it is nobody we know.

    Where it is ``None``, ``scope["auth_problem"]`` says why: ``missing`` (no
    credentials: 401), ``invalid`` (unknown, expired or revoked: 401), ``csrf`` or
    ``origin`` (a session from the wrong place: 403).

    Raises:
        django.db.DatabaseError: the database did not answer; reply 503.
    """
    websocket = scope["type"] == "websocket"
    authorization = _headers(scope, b"authorization")
    if authorization:
        principal = await _by_bearer(authorization)
        if principal is not None and websocket and not origin_allowed(scope, with_key=True):
            return _refuse(scope, "origin")
        return principal or _refuse(scope, "invalid")
    if websocket:
        if not origin_allowed(scope):
            return _refuse(scope, "origin")
        ticket = _ticket(scope)
        if ticket is not None:
            return await redeem_ticket(ticket) or _refuse(scope, "invalid")
    principal = await _by_session(scope)
    if principal is None:
        return _refuse(scope, "missing")
    if not websocket and scope["method"] not in SAFE_METHODS and not _csrf_ok(scope):
        return _refuse(scope, "csrf")
    return principal


async def renewed(principal: Principal) -> Principal | None:
    """A caller of a moment ago with the rights and limits of now; for sockets that stay open.

    ``None`` where it would not be let in any more. Answers from memory for as long as
    a key would be believed (see ``keycache``). A session user counts as valid while the
    account is active and has the same password: signing out ends the session, and the
    page that holds the socket with it.
    """
    name = f"still:{principal.owner}:{principal.password}"
    known = cache.get(name)
    if known is not None:
        return known
    generation = cache.generation
    now = await database_sync_to_async(_principal_now)(principal)
    if now is not None:
        cache.put(name, now, generation=generation)
    return now


def _principal_now(principal: Principal) -> Principal | None:
    if principal.via == "key":
        keys = ApiKey.objects.active().select_related("user")
        key = keys.filter(prefix=principal.owner.removeprefix("key:")).first()
        return None if key is None else key_principal(key)
    user = session_user(principal)
    return None if user is None else user_principal(user)


async def flush() -> None:
    """Wait until the last-used times noted in the background have been written."""
    while _background:
        await asyncio.gather(*_background, return_exceptions=True)


def _refuse(scope: Scope, problem: str) -> None:
    scope["auth_problem"] = problem


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope.get("headers", []) if key.lower() == name]


# --- API keys -------------------------------------------------------------------------


async def _by_bearer(values: list[bytes]) -> Principal | None:
    if len(values) != 1:
        return None
    scheme, _, key = values[0].decode("latin-1").strip().partition(" ")
    key = key.strip()
    prefix = keyformat.split_key(key)
    if scheme.lower() != "bearer" or prefix is None:
        return None
    digest = keyformat.digest(key)
    principal = cache.get(digest)
    return principal if principal is not None else await _shared_lookup(prefix, digest)


async def _shared_lookup(prefix: str, digest: str) -> Principal | None:
    """Look a key up; callers that ask for the same key meanwhile share one query."""
    task = _lookups.get(digest)
    if task is None or task.get_loop() is not asyncio.get_running_loop():
        task = asyncio.create_task(_lookup(prefix, digest), name=f"apikey-lookup-{prefix}")
        _lookups[digest] = task
        task.add_done_callback(lambda done: _looked_up(digest, done))
    # Shielded: a caller that disconnects must not cancel the lookup of the others.
    return await asyncio.shield(task)


def _looked_up(digest: str, task: asyncio.Task[Principal | None]) -> None:
    if _lookups.get(digest) is task:
        del _lookups[digest]
    if not task.cancelled():
        task.exception()  # seen here even where every caller has gone


async def _lookup(prefix: str, digest: str) -> Principal | None:
    generation = cache.generation
    found = await database_sync_to_async(_find_key)(prefix, digest)
    if found is None:
        return None
    key, principal = found
    cache.put(digest, principal, generation=generation)
    task = asyncio.create_task(_touch(key.pk), name=f"apikey-touch-{prefix}")
    _background.add(task)
    task.add_done_callback(_background.discard)
    return principal


def _find_key(prefix: str, digest: str) -> tuple[ApiKey, Principal] | None:
    key = ApiKey.objects.active().select_related("user").filter(prefix=prefix).first()
    # Compared in constant time, and also where there is no such prefix.
    if not hmac.compare_digest(key.digest if key else "0" * 64, digest) or key is None:
        return None
    return key, key_principal(key)


async def _touch(pk: int) -> None:
    try:
        await database_sync_to_async(lambda: ApiKey.objects.all().touch(pk, every=LAST_USED_EVERY))()
    except DatabaseError as e:  # a busy database costs this note, never the request
        logger.warning("last use of an API key not noted: %s", e)


def key_principal(key: ApiKey) -> Principal:
    """What a key's bearer may do; ``admin`` only as long as its user is a superuser."""
    user = key.user
    key_scopes = set(key.scopes)
    if user is not None and not user.is_superuser:
        key_scopes.discard("admin")
    return Principal(
        owner=f"key:{key.prefix}",
        user_id=None if user is None else user.pk,
        is_staff="admin" in key_scopes,
        scopes=frozenset(key_scopes),
        allowed_models=tuple(key.allowed_models) or None,
        label=f"{key.name} ({key.prefix})",
        via="key",
        quotas=(quota_for(f"key:{key.prefix}", key.own_limits()), *_user_quota(user)),
    )


def _user_quota(user: Any) -> tuple[Quota, ...]:
    if user is None:
        return ()
    limits = UserLimits.objects.filter(user=user).first()
    return (quota_for(f"user:{user.pk}", limits.own_limits() if limits else {}),)


# --- Sessions -------------------------------------------------------------------------


async def _by_session(scope: Scope) -> Principal | None:
    cookies = parse_cookie(header(scope, b"cookie"))
    session_key = cookies.get(settings.SESSION_COOKIE_NAME)
    if not session_key or not session_key.isprintable():
        return None  # a quoted cookie may hold NUL, which PostgreSQL does not take
    return await database_sync_to_async(_session_principal)(session_key)


def _session_principal(session_key: str) -> Principal | None:
    session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    # get_user() needs a request for its session only; it checks the session's
    # password hash, so that a password change ends the other sessions.
    user = get_user(SimpleNamespace(session=session))  # type: ignore[arg-type]
    return user_principal(user) if user.is_authenticated else None


def user_principal(user: Any) -> Principal:
    """What a signed-in user may do.

    Staff is not enough for ``admin``: what staff may see and stop is granted piece
    by piece, by the permissions of ``apps.inflight``, in Django's admin.
    """
    scopes = {"generate", "read"} | ({"admin"} if user.is_superuser else set())
    return Principal(
        owner=f"user:{user.pk}",
        user_id=user.pk,
        is_staff=user.is_staff,
        scopes=frozenset(scopes),
        allowed_models=None,
        label=user.get_username(),
        via="session",
        quotas=_user_quota(user),
        password=user.get_session_auth_hash(),
    )


class _CsrfCheck(CsrfViewMiddleware):
    """Django's own check, giving the reason instead of a page."""

    def _reject(self, request: HttpRequest, reason: str) -> str:
        return reason


def _csrf_ok(scope: Scope) -> bool:
    # Without its content type and body: the token is looked for in X-CSRFToken
    # only, and no form parser ever sees a body that the consumer still has to read.
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-type", b"content-length")]
    request = ASGIRequest({**scope, "headers": headers}, io.BytesIO())
    check = _CsrfCheck(lambda r: None)  # type: ignore[arg-type,return-value]
    check.process_request(request)
    return check.process_view(request, None, (), {}) is None


def _ticket(scope: Scope) -> str | None:
    for protocol in scope.get("subprotocols", []):
        if protocol.startswith(TICKET_PROTOCOL):
            return protocol[len(TICKET_PROTOCOL) :]
    try:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"), max_num_fields=20)
    except ValueError:
        return None  # more fields than that carry no ticket of ours
    values = query.get("ticket")
    return values[0] if values else None
