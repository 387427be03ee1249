"""Names for the owners that request records carry."""

from __future__ import annotations

import time
from collections.abc import Iterable

from apps.accounts.usage import names_of

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
    fresh = {o: o for o in missing}
    for owner, name in names_of(missing).items():
        fresh[owner] = f"{name} ({owner.removeprefix('key:')})" if owner.startswith("key:") else name
    until = time.monotonic() + TTL
    if len(_names) + len(fresh) > MAX_ENTRIES:
        _names.clear()
    _names.update((o, (until, n)) for o, n in fresh.items())
    return {**found, **fresh}
