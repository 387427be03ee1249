"""The process's short memory of keys, and of open sockets' callers, that were found valid.

A key that is used a hundred times a second is looked up in the database once a
second. A key revoked elsewhere is refused here after at most :data:`TTL`; one
revoked in this process is refused at once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from apps.accounts.principal import Principal

TTL = 1.0
"""Seconds for which an answer of the database is believed."""

MAX_ENTRIES = 4096


class KeyCache:
    """Digest of a whole key (or another name) -> principal; bounded, oldest out first. Thread-safe."""

    def __init__(self, ttl: float = TTL, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, tuple[float, Principal]] = OrderedDict()
        self._generation = 0

    @property
    def generation(self) -> int:
        """Goes up with each :meth:`forget`; see :meth:`put`."""
        return self._generation

    def get(self, name: str) -> Principal | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            if entry[0] <= self._clock():
                del self._entries[name]
                return None
            return entry[1]

    def put(self, name: str, principal: Principal, *, generation: int) -> None:
        """Remember an answer, unless a key was revoked since the question was asked.

        Without the check a lookup that began before a revocation could put the
        revoked key back after it.
        """
        with self._lock:
            if generation != self._generation:
                return
            self._entries[name] = (self._clock() + self._ttl, principal)
            self._entries.move_to_end(name)
            while len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)

    def forget(self) -> None:
        """Drop everything; called when a key or a user changes in this process."""
        with self._lock:
            self._generation += 1
            self._entries.clear()


cache = KeyCache()
