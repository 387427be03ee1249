"""Password sign-in that slows down guessing, on every login page (Django's admin has its own)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from django.contrib.auth.backends import ModelBackend
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

WINDOW = 300.0
"""Seconds for which a failure counts."""
PER_NAME = 10
"""Failures of one user name from one address within the window, before further tries are refused."""
PER_ADDRESS = 100
"""The same for all names together."""
MAX_ENTRIES = 10_000


class Failures:
    """Counts failures by key in fixed windows. Bounded, thread-safe, of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()

    def count(self, key: tuple[str, ...]) -> int:
        with self._lock:
            until, count = self._counts.get(key, (0.0, 0))
            return count if until > self._clock() else 0

    def add(self, key: tuple[str, ...]) -> None:
        with self._lock:
            now = self._clock()
            until, count = self._counts.get(key, (0.0, 0))
            self._counts[key] = (until, count + 1) if until > now else (now + WINDOW, 1)
            self._counts.move_to_end(key)
            while len(self._counts) > MAX_ENTRIES:
                self._counts.popitem(last=False)

    def forget(self, *keys: tuple[str, ...]) -> None:
        """Drop the counts of some keys, or all of them."""
        with self._lock:
            for key in keys:
                self._counts.pop(key, None)
            if not keys:
                self._counts.clear()


failures = Failures()


class ThrottledBackend(ModelBackend):
    """Django's own, which refuses even the right password after too many wrong ones.

    Counted by name *and* address, so that a stranger cannot lock a user out from
    elsewhere. Several servers count apart: the limit is per process.
    """

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> Any:
        if request is None or username is None:
            return super().authenticate(request, username=username, password=password, **kwargs)
        address = str(request.META.get("REMOTE_ADDR", ""))
        by_name, by_address = ("name", username[:150].casefold(), address), ("address", address)
        if failures.count(by_name) >= PER_NAME or failures.count(by_address) >= PER_ADDRESS:
            raise PermissionDenied  # ends the attempt; the page says what it says of a wrong password
        user = super().authenticate(request, username=username, password=password, **kwargs)
        if user is None:
            failures.add(by_name)
            failures.add(by_address)
        else:
            failures.forget(by_name)
        return user
