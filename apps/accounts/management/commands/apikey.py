"""Create, list and revoke API keys."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.management.base import CommandError, CommandParser
from django.utils import timezone

from apps.accounts import keyformat, services
from apps.accounts.models import LIMIT_FIELDS, ApiKey, Scope, default_scopes
from sluice.command import Command as SluiceCommand


class Command(SluiceCommand):
    help = (
        "Create, list and revoke API keys. A key is shown once, when it is created. "
        "For instance: apikey create 'nightly batch' --user ann --days 30"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="create|list|revoke")
        create = verbs.add_parser("create", help="make a key and print it, once")
        create.add_argument(
            "label", metavar="LABEL", help="what the key is for, in your words (not a user: whose it is says --user)"
        )
        create.add_argument("--user", metavar="NAME", help="the user whose key it is (default: nobody, a service key)")
        create.add_argument(
            "--scope", action="append", choices=Scope.values, metavar="|".join(Scope.values),
            help=f"may be repeated (default: {' and '.join(default_scopes())})",
        )  # fmt: skip
        create.add_argument("--model", action="append", default=[], metavar="ALIAS",
                            help="allow this model only; may be repeated (default: all)")  # fmt: skip
        create.add_argument("--days", type=_days, help="valid for so many days (default: for ever)")
        for name in LIMIT_FIELDS:
            flag = f"--{name.replace('_', '-')}"
            create.add_argument(flag, type=_limit, metavar="N", help="0 for no limit (default: the server's)")
        create.add_argument("--quiet", action="store_true", help="print the key and nothing else")
        listing = verbs.add_parser("list", help="show all keys, without their secrets")
        listing.add_argument("--user", metavar="NAME", help="only this user's")
        listing.add_argument("--active", action="store_true", help="only those that work now")
        revoke = verbs.add_parser("revoke", help="end a key for good")
        revoke.add_argument("prefix", metavar="PREFIX", help="the key's prefix, as `list` shows it (or the whole key)")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            getattr(self, f"_{options['verb']}")(**options)
        except ValidationError as e:
            raise CommandError(" ".join(e.messages)) from None
        except PermissionDenied as e:
            raise CommandError(str(e)) from None

    def _create(self, *, label: str, user: str | None, scope: list[str] | None, model: list[str],
                days: float | None, quiet: bool, **rest: Any) -> None:  # fmt: skip
        owner = _user(user) if user else None
        expires = timezone.now() + timedelta(days=days) if days is not None else None
        made = services.create_key(
            None,
            name=label,
            user=owner,
            scopes=scope,
            expires_at=expires,
            allowed_models=model,
            limits={n: rest[n] for n in LIMIT_FIELDS},
        )
        self.stdout.write(made.secret)
        if not quiet:
            self.stderr.write(f"Key {made.key.prefix} created. It is not shown again: keep it now.")

    def _list(self, *, user: str | None, active: bool, **_: Any) -> None:
        keys = ApiKey.objects.active() if active else ApiKey.objects.all()
        if user:
            keys = keys.for_user(_user(user))
        row = "{:<10} {:<24} {:<16} {:<20} {:<8} {:<17} {}"
        self.stdout.write(row.format("PREFIX", "LABEL", "USER", "SCOPES", "STATUS", "LAST USED", "MODELS"))
        for key in keys.select_related("user"):
            used = f"{key.last_used:%Y-%m-%d %H:%M}" if key.last_used else "never"
            owner = key.user.get_username() if key.user else "-"
            models = ",".join(key.allowed_models) or "all"
            self.stdout.write(row.format(key.prefix, key.name, owner, ",".join(key.scopes), key.status, used, models))

    def _revoke(self, *, prefix: str, **_: Any) -> None:
        prefix = keyformat.split_key(prefix) or prefix
        key = ApiKey.objects.filter(prefix=prefix).first()
        if key is None:
            raise CommandError(f"There is no key with the prefix {prefix!r}; `apikey list` shows them all.")
        done = services.revoke_key(None, key)
        self.stdout.write(f"Key {prefix} revoked." if done else f"Key {prefix} had been revoked before.")


def _user(name: str) -> Any:
    model = get_user_model()
    try:
        return model._default_manager.get_by_natural_key(name)
    except model.DoesNotExist:
        raise CommandError(f"There is no user {name!r}.") from None


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= 36500:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 36500")
    return days


def _limit(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 2**31 - 1:
        raise argparse.ArgumentTypeError("must be 0 or more, and below 2147483648")
    return number
