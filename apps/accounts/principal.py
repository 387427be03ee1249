"""Who is calling, as one value that API, UI and limits share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from apps.accounts.quota import Quota


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        owner: ``key:<prefix>`` or ``user:<id>``; what a request record carries.
        user_id: the Django user behind the session or the key; ``None`` for a
            service key.
        is_staff: may enter pages for staff; what such a page shows is a matter
            of Django's permissions.
        scopes: of ``generate``, ``read``, ``admin``; ``admin`` (superusers and
            their keys) may see and act on everybody's requests.
        allowed_models: aliases the caller may use; ``None`` for all.
        label: a name for people: user name, or key name with its prefix.
        via: ``key`` or ``session``: how the caller proved who it is.
        quotas: what it may use: of the key, and of the user over all keys.
        password: of a session, Django's hash of the password that it began with; it ends with that password.
    """

    owner: str
    user_id: int | None
    is_staff: bool
    scopes: frozenset[str]
    allowed_models: tuple[str, ...] | None
    label: str
    via: str = "key"
    quotas: tuple[Quota, ...] = ()
    password: str = field(default="", repr=False)

    def may(self, scope: str) -> bool:
        """Whether the caller holds a scope; ``admin`` includes the others."""
        return scope in self.scopes or "admin" in self.scopes

    def may_use(self, model: str) -> bool:
        """Whether the caller may generate with the model of this alias."""
        return self.allowed_models is None or model in self.allowed_models

    def owns(self, owner: str) -> bool:
        """Whether a request of ``owner`` is the caller's to see, re-attach to and cancel."""
        return self.owner == owner or "admin" in self.scopes

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**plain, "scopes": sorted(self.scopes), "quotas": msgspec.to_builtins(self.quotas)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Principal:
        models = data["allowed_models"]
        return cls(
            owner=data["owner"],
            user_id=data["user_id"],
            is_staff=data["is_staff"],
            scopes=frozenset(data["scopes"]),
            allowed_models=None if models is None else tuple(models),
            label=data["label"],
            via=data["via"],
            quotas=tuple(msgspec.convert(data.get("quotas", []), list[Quota])),
            password=data.get("password", ""),
        )
