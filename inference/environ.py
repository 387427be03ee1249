"""Settings that are read from the environment: one class each, one way to read and to refuse."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Self, get_args, get_type_hints

import msgspec

from inference.errors import ConfigError

#: Endings of the names of fields that hold secrets, or addresses with a password in them.
_SECRET = ("_token", "_url")

MAX_DRAIN_SECONDS = 1800.0
"""The longest time for ending in good order that can be meant; more was given in milliseconds."""

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def env_name(field: str) -> str:
    """The environment variable of a field."""
    return "REDIS_URL" if field == "redis_url" else f"SLUICE_{field.upper()}"


class EnvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a settings class: every field is the variable that :func:`env_name` says."""

    def __repr__(self) -> str:
        """Without passwords and tokens: pages of errors, and whoever prints settings, show this."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={'***' if name.endswith(_SECRET) and value else repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Build from environment variables; ``overrides`` that are not ``None`` win over them.

        An empty variable is as one that is not set.

        Raises:
            ConfigError: a value has the wrong type or is out of range.
        """
        env = os.environ if env is None else env
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for name in cls.__struct_fields__:
            raw = env.get(env_name(name), "").strip()
            if raw:
                values[name] = _convert(name, raw, hints[name])
        for name, value in overrides.items():
            if value is not None:
                values[name] = _finite(name, value, value, hints[name])
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """These settings as environment variables, for a child process."""
        out = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None:
                out[env_name(name)] = str(value).lower() if isinstance(value, bool) else str(value)
        return out

    def require_positive(self, fields: Iterable[str]) -> None:
        """Raises ConfigError for the first of ``fields`` that is not greater than 0."""
        for name in fields:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{env_name(name)} must be greater than 0, not {getattr(self, name):g}")

    def require_not_negative(self, fields: Iterable[str]) -> None:
        """Raises ConfigError for the first of ``fields`` that is below 0."""
        for name in fields:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{env_name(name)} must not be negative, not {getattr(self, name):g}")

    def require_drain_seconds(self, fields: Iterable[str]) -> None:
        """Raises ConfigError for the first of ``fields`` that is no time for a drain."""
        for name in fields:
            value = getattr(self, name)
            if not 0 <= value <= MAX_DRAIN_SECONDS:
                hint = " - is it in milliseconds?" if value > MAX_DRAIN_SECONDS else ""
                raise ConfigError(
                    f"{env_name(name)} must be between 0 and {MAX_DRAIN_SECONDS:.0f} seconds, not {value:g}{hint}"
                )


def _convert(field: str, raw: str, hint: Any) -> Any:
    try:
        value = msgspec.convert(raw, hint, strict=False)
    except msgspec.ValidationError:
        value = math.nan
    return _finite(field, raw, value, hint)


def _finite(field: str, raw: Any, value: Any, hint: Any) -> Any:
    # float() takes "nan" and "inf" as well, and nobody means them.
    if isinstance(value, float) and not math.isfinite(value):
        plain = next((kind for kind in (hint, *get_args(hint)) if kind in _KINDS), None)
        want = _KINDS[plain] if plain else "one of " + ", ".join(get_args(hint))
        raise ConfigError(f"{env_name(field)} must be {want}, not {raw!r}")
    return value
