"""The consumers that are being served, so that a drain can reach them."""

from __future__ import annotations

from typing import Any

_live: set[Any] = set()


def live_consumers() -> list[Any]:
    """Every consumer of this base between its scope and its end."""
    return list(_live)


def enter(consumer: Any) -> None:
    _live.add(consumer)


def leave(consumer: Any) -> None:
    _live.discard(consumer)
