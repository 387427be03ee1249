"""Names for the owners that request records carry."""

from __future__ import annotations

import time
from collections.abc import Iterable

from django.contrib.auth import get_user_model

from apps.accounts.models import ApiKey

TTL = 60.0
MAX_ENTRIES = 10_000

_names: dict[str, tuple[float, str]] = {}


def known(owners: Iterable[str]) -> dict[str, str]:
    """What is remembered, without a query."""
    now = time.monotonic()
    return {o: _names[o][1] for o in set(owners) if o in _names and _names[o][0] > now}


def names(owners: Iterable[str]) -> dict[str, str]:
    """``user:3`` -> user name, ``key:ab12`` -> key name; two queries at most, remembered for a minute."""
    wanted = set(owners)
    found = known(wanted)
    missing = wanted - found.keys()
    if not missing:
        return found
    users = [int(o[5:]) for o in missing if o.startswith("user:") and o[5:].isdecimal() and len(o) < 24]
    keys = [o[4:] for o in missing if o.startswith("key:")]
    fresh = {o: o for o in missing}
    if users:
        field = get_user_model().USERNAME_FIELD
        rows = get_user_model()._default_manager.filter(pk__in=users).values_list("pk", field)
        fresh.update((f"user:{pk}", name) for pk, name in rows)
    if keys:
        rows = ApiKey.objects.filter(prefix__in=keys).values_list("prefix", "name")
        fresh.update((f"key:{prefix}", f"{name} ({prefix})") for prefix, name in rows)
    until = time.monotonic() + TTL
    if len(_names) + len(fresh) > MAX_ENTRIES:
        _names.clear()
    _names.update((o, (until, n)) for o, n in fresh.items())
    return {**found, **fresh}
