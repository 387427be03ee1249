"""The route table: every path that is not Django's, with its methods and its access rule.

One place answers "who may call what": the router, the access check, the labels
of the open-exchange count and the metrics all read it. An app lists its own
routes in its ``routing`` module; they are put together here.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

from django.urls import path as django_path
from django.utils.module_loading import import_string

_ENCODED = re.compile(rb"%([0-9A-Fa-f]{2})")
_NEVER_ENCODED = frozenset(b"/\\.%\x00" + string.ascii_letters.encode() + string.digits.encode())

#: ``public``: anybody. ``key``: an API key, or a signed-in user of this site. ``session``:
#: a signed-in user. ``staff``: a key with the admin scope, or a signed-in staff user.
#: ``metrics``: who may scrape, see ``SLUICE_METRICS_ACCESS``.
Access = Literal["public", "key", "session", "staff", "metrics"]


@dataclass(frozen=True)
class Route:
    """One path and who answers it.

    Attributes:
        path: as for :func:`django.urls.path`, without the leading slash.
        consumer: dotted name of a consumer class (``as_asgi``) or an ASGI app.
        methods: allowed HTTP methods; HEAD goes with GET and OPTIONS with all.
        access: who may call it; checked before a body is read.
        kind: ``http`` or ``websocket``.
        inference: starts generations: refused while the server drains.
    """

    path: str
    consumer: str
    methods: tuple[str, ...] = ("GET",)
    access: Access = "key"
    kind: Literal["http", "websocket"] = "http"
    inference: bool = False

    @cached_property
    def template(self) -> str:
        """The path as label: ``/v1/requests/{id}/events``."""
        out = []
        for part in self.path.split("/"):
            if part.startswith("<"):
                part = "{" + part.strip("<>").rpartition(":")[2] + "}"
            out.append(part)
        return "/" + "/".join(out)

    @cached_property
    def allow(self) -> str:
        """The value of the ``Allow`` header."""
        extra = ["HEAD"] if "GET" in self.methods else []
        return ", ".join([*self.methods, *extra, "OPTIONS"])

    @cached_property
    def pattern(self) -> Any:
        return django_path(self.path, lambda: None).pattern

    def application(self) -> Any:
        """The ASGI application behind ``consumer``."""
        target = import_string(self.consumer)
        return target.as_asgi() if hasattr(target, "as_asgi") else target


#: What the server itself answers.
OWN = [
    Route("livez", "sluice.health.LiveConsumer", access="public"),
    Route("readyz", "sluice.health.ReadyConsumer", access="public"),
    Route("metrics", "sluice.health.MetricsConsumer", access="metrics"),
]

#: Modules that list further routes, under these names.
LISTED_IN = [
    ("apps.api.routing", ("http_routes", "websocket_routes")),
    ("apps.chat.routing", ("http_routes", "websocket_routes")),
    ("apps.inflight.routing", ("http_routes",)),
]


@lru_cache(maxsize=1)
def all_routes() -> tuple[Route, ...]:
    """The whole table.

    Raises:
        ValueError: two routes of one kind share a path.
    """
    routes = list(OWN)
    for module, names in LISTED_IN:
        if find_spec(module) is None:
            continue
        listing = import_module(module)
        for name in names:
            routes += getattr(listing, name, [])
    seen: set[tuple[str, str]] = set()
    for route in routes:
        if (route.kind, route.path) in seen:
            raise ValueError(f"two {route.kind} routes for {route.template}")
        seen.add((route.kind, route.path))
    return tuple(routes)


class RouteMatcher:
    """Finds the route of a path; exact ones by dictionary, those with parts by pattern."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[tuple[str, str], Route] = {}
        self._patterns: list[Route] = []
        for route in routes:
            if "<" in route.path:
                self._patterns.append(route)
            else:
                self._exact[route.kind, "/" + route.path] = route

    def match(self, kind: str, path: str) -> tuple[Route, dict[str, Any]] | None:
        """The route and its captured parts, or ``None``."""
        route = self._exact.get((kind, path))
        if route is not None:
            return route, {}
        for route in self._patterns:
            if route.kind == kind and (found := route.pattern.match(path[1:])):
                return route, found[2]
        return None


def is_canonical(path: str, raw_path: bytes | None) -> bool:
    """Whether a path has one spelling only.

    Doubled slashes, dot segments, backslashes and percent-encoded slashes, dots,
    letters or digits never reach a handler: another layer might read them differently, and
    a rule for one spelling must hold for all.
    """
    if not path.startswith("/") or "//" in path or "\\" in path or "\x00" in path:
        return False
    if any(part in (".", "..") for part in path.split("/")):
        return False
    if raw_path is not None and b"%" in raw_path:
        codes = _ENCODED.findall(raw_path.partition(b"?")[0])
        return not any(int(code, 16) in _NEVER_ENCODED for code in codes)
    return True
