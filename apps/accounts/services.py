"""Each change of a key: checks permission, makes the change, writes Django's admin log.

Views, admin and commands call these and do nothing of the kind themselves.
``actor`` is the user who acts; ``None`` is an operator at the shell.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TextIO

from django.contrib.admin.models import ADDITION, CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.utils import timezone

from apps.accounts import keyformat
from apps.accounts.keycache import cache
from apps.accounts.models import ApiKey, Scope, default_scopes

logger = logging.getLogger(__name__)

MAX_KEYS_PER_USER = 50


class CreatedKey(NamedTuple):
    """A new key; ``secret`` is the whole key and is not to be had again."""

    key: ApiKey
    secret: str


class FirstRun(NamedTuple):
    username: str
    password: str
    key: str


def create_key(
    actor: Any,
    *,
    name: str,
    user: Any = None,
    scopes: Sequence[str] | None = None,
    expires_at: datetime | None = None,
    allowed_models: Sequence[str] = (),
    limits: Mapping[str, int | None] | None = None,
) -> CreatedKey:
    """Make a key for ``user`` (``None``: a service key).

    ``limits`` are by the names of :data:`apps.accounts.models.LIMIT_FIELDS`.

    Raises:
        PermissionDenied: ``actor`` may not make keys for others, or asks for
            ``admin`` without being a superuser.
        ValidationError: a field is malformed, the expiry is past, or the user
            holds too many keys.
    """
    wanted = default_scopes() if scopes is None else list(scopes)
    _check_create(actor, user, wanted)
    if expires_at is not None and expires_at <= timezone.now():
        raise ValidationError({"expires_at": "The expiry must lie in the future."})
    if user is not None and ApiKey.objects.active().for_user(user).count() >= MAX_KEYS_PER_USER:
        raise ValidationError(f"A user may hold {MAX_KEYS_PER_USER} active keys; revoke one first.")
    prefix = keyformat.new_prefix()
    secret = f"{keyformat.KEY_START}{prefix}-{keyformat.new_secret()}"
    key = ApiKey(
        user=user,
        name=name.strip(),
        prefix=prefix,
        digest=keyformat.digest(secret),
        scopes=wanted,
        allowed_models=[m.strip() for m in allowed_models],
        expires_at=expires_at,
        **(limits or {}),
    )
    key.full_clean()
    with transaction.atomic():
        key.save(force_insert=True)
        _log(actor, key, ADDITION, f"Created API key {prefix} with scopes {', '.join(wanted)}.")
    return CreatedKey(key, secret)


def revoke_key(actor: Any, key: ApiKey) -> bool:
    """End a key for good; ``False`` if it had been revoked before.

    Raises:
        PermissionDenied: ``actor`` neither owns the key nor may change keys.
    """
    owns = actor is not None and key.user_id is not None and key.user_id == actor.pk
    if actor is not None and not owns and not actor.has_perm("accounts.change_apikey"):
        raise PermissionDenied("You may not revoke this key.")
    with transaction.atomic():
        changed = ApiKey.objects.filter(pk=key.pk, revoked_at__isnull=True).update(revoked_at=timezone.now())
        if changed:
            _log(actor, key, CHANGE, f"Revoked API key {key.prefix}.")
    # After the commit, so that no lookup in between can bring the key back.
    cache.forget()
    key.refresh_from_db(fields=["revoked_at"])
    return bool(changed)


def ensure_first_run(stdout: TextIO | None = None, *, username: str = "admin") -> FirstRun | None:
    """Where there is no user yet, make an administrator and a key; else ``None``.

    The password and the key are random, returned, written to ``stdout`` where
    one is given, and not to be had again.
    """
    users = get_user_model()._default_manager
    if users.exists():
        return None
    password = keyformat.new_secret()[:16]
    with transaction.atomic():
        user = users.create_superuser(username=username, email="", password=password)  # type: ignore[attr-defined]
        secret = create_key(user, name="first key", user=user, scopes=[s.value for s in Scope]).secret
    if stdout is not None:
        stdout.write(f"Sign in as {username} with the password {password}\n")
        stdout.write(f"API key: {secret}\n")
        stdout.write("Neither is shown again.\n")
    return FirstRun(username, password, secret)


def _check_create(actor: Any, user: Any, scopes: Sequence[str]) -> None:
    if Scope.ADMIN in scopes and user is not None and not user.is_superuser:
        raise PermissionDenied("A key with the admin scope can belong to a superuser only.")
    if actor is None:
        return
    own = user is not None and user.pk == actor.pk
    if not own and not actor.has_perm("accounts.add_apikey"):
        raise PermissionDenied("You may make keys for yourself only.")
    if Scope.ADMIN in scopes and not actor.is_superuser:
        raise PermissionDenied("Only a superuser may make a key with the admin scope.")


def _log(actor: Any, key: ApiKey, flag: int, message: str) -> None:
    by = actor if actor is not None else key.user
    if actor is None:
        message = f"{message} By command at the shell."
    logger.info("%s", message, extra={"event": "apikey", "prefix": key.prefix})
    if by is not None:  # Django's log needs a user; a service key made at the shell has none
        LogEntry.objects.log_actions(by.pk, [key], flag, change_message=message, single_object=True)
