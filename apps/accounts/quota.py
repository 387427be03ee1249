"""How much a caller may use, as a plain value that travels with the principal."""

from __future__ import annotations

import os
from functools import lru_cache

import msgspec

from inference.errors import ConfigError


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one subject, a key or a user. 0 means no limit.

    Attributes:
        subject: ``key:<prefix>`` or ``user:<id>``.
        requests: requests per minute. tokens: prompt and answer tokens per minute.
        concurrent: requests at once. max_tokens: answer tokens of one request.
        day_tokens: prompt and answer tokens per day (UTC).
    """

    subject: str
    requests: int = 0
    tokens: int = 0
    concurrent: int = 0
    max_tokens: int = 0
    day_tokens: int = 0

    @property
    def metered(self) -> bool:
        """Whether Redis has to keep count; ``max_tokens`` alone needs no counting."""
        return bool(self.requests or self.tokens or self.concurrent or self.day_tokens)


NAMES = ("requests", "tokens", "concurrent", "max_tokens", "day_tokens")


@lru_cache(maxsize=1)
def defaults() -> dict[str, int]:
    """Limits of keys and users that have none of their own: ``SLUICE_LIMIT_<NAME>``, 0 for none.

    Raises:
        ConfigError: a value is no whole number, or negative.
    """
    values = {}
    for name in NAMES:
        variable = f"SLUICE_LIMIT_{name.upper()}"
        raw = os.environ.get(variable, "").strip() or "0"
        if not raw.isascii() or not raw.isdigit() or len(raw) > 15:
            raise ConfigError(f"{variable} must be a whole number, 0 for no limit, not {raw!r}")
        values[name] = int(raw)
    return values


def quota_for(subject: str, own: dict[str, int | None]) -> Quota:
    """The limits of a subject: its own where set, else the defaults."""
    chosen = {n: v if (v := own.get(n)) is not None else d for n, d in defaults().items()}
    return Quota(subject=subject, **chosen)
