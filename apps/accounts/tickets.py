"""WebSocket tickets: proof of identity for a browser, which cannot set headers on a handshake.

A ticket lives seconds and works once, on whichever server. It is kept in the
database, where deleting its row is the atomic step that only one server wins.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from channels.db import database_sync_to_async
from django.contrib.auth import get_user_model
from django.utils import timezone
from django.utils.crypto import constant_time_compare

from apps.accounts import keyformat
from apps.accounts.models import ApiKey, Ticket
from apps.accounts.principal import Principal

TICKET_SECONDS = 30


async def issue_ticket(principal: Principal, *, seconds: float = TICKET_SECONDS) -> str:
    """A new ticket for a caller; also clears away those that nobody redeemed."""
    token = keyformat.new_secret()
    await database_sync_to_async(_store)(keyformat.digest(token), principal, seconds)
    return token


async def redeem_ticket(token: str) -> Principal | None:
    """Who the ticket was issued to; ``None`` if it is unknown, used or too old.

    Rights are those of the moment of issue, except that a user disabled, a password
    changed or a key revoked since then is refused.
    """
    if len(token) != keyformat.SECRET_LENGTH or not token.isascii():
        return None
    return await database_sync_to_async(_redeem)(keyformat.digest(token))


def _store(digest: str, principal: Principal, seconds: float) -> None:
    now = timezone.now()
    Ticket.objects.filter(expires_at__lte=now).delete()
    Ticket.objects.create(digest=digest, principal=principal.to_dict(), expires_at=now + timedelta(seconds=seconds))


def _redeem(digest: str) -> Principal | None:
    ticket = Ticket.objects.filter(digest=digest, expires_at__gt=timezone.now()).first()
    if ticket is None:
        return None
    deleted, _ = Ticket.objects.filter(pk=ticket.pk).delete()
    if deleted != 1:
        return None  # another server was first
    principal = Principal.from_dict(ticket.principal)
    return principal if account_active(principal) else None


def account_active(principal: Principal) -> bool:
    """Whether the key has not been revoked and has not expired, or the session's user is as then. Asks the database."""
    if principal.via == "key":
        return ApiKey.objects.active().filter(prefix=principal.owner.removeprefix("key:")).exists()
    return session_user(principal) is not None


def session_user(principal: Principal) -> Any:
    """The user of a session, ``None`` where disabled or with another password than then. Asks the database."""
    user: Any = get_user_model()._default_manager.filter(pk=principal.user_id, is_active=True).first()
    same = user is not None and constant_time_compare(user.get_session_auth_hash(), principal.password)
    return user if same else None
