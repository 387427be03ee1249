"""Every path that the server answers, with who may call it: the route table and Django's views."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from django.contrib.admin import site
from django.urls import URLPattern, URLResolver, get_resolver

from sluice.routes import all_routes

#: Django's views that answer strangers, and what they do for them. Every other one wants a
#: signed-in user (or staff, below ``/admin/``); a test calls each as a stranger.
OPEN_VIEWS = {
    "/accounts/login/": "public (sign in)",
    "/admin/login/": "public (sign in)",
    "/accounts/logout/": "public (ends a session)",
    "/admin/logout/": "public (ends a session)",
    "/favicon.ico": "public (redirect)",
}
MEANING = {
    "public": "public",
    "key": "key or session",
    "session": "session",
    "staff": "staff",
    "metrics": "`SLUICE_METRICS_ACCESS`",
}


def table() -> list[tuple[str, str, str]]:
    """(path, methods, rule) of everything, the route table first."""
    rows = []
    for route in sorted(all_routes(), key=lambda r: r.template):
        methods = "WebSocket" if route.kind == "websocket" else ", ".join(route.methods)
        rows.append((route.template, methods, MEANING[route.access]))
    rows.append(("/static/{path}", "GET", "public (files of the release)"))
    for path in sorted(set(_django_paths())):
        if path in OPEN_VIEWS:
            rule = OPEN_VIEWS[path]
        elif path.startswith("/admin/"):
            rule = "staff, with the permission"
        else:
            rule = "session"
        rows.append((path, "Django", rule))
    return rows


def markdown() -> str:
    """The table for the documentation; the admin's pages of one model share a line."""
    lines = ["| path | methods | who |", "|---|---|---|"]
    return "\n".join([*lines, *dict.fromkeys(f"| `{p}` | {m} | {who} |" for p, m, who in table())])


def _django_paths() -> Iterator[str]:
    models = "|".join(re.escape(f"{m._meta.app_label}/{m._meta.model_name}") for m in site._registry)
    for path in _walk(get_resolver().url_patterns, "/"):
        # What follows a model of the admin differs in nothing but the permission asked for.
        yield re.sub(rf"^/admin/({models})/.*", r"/admin/\1/...", path)


def _walk(patterns: Any, prefix: str) -> Iterator[str]:
    for entry in patterns:
        route = str(entry.pattern)
        if isinstance(entry, URLResolver):
            yield from _walk(entry.url_patterns, prefix + route)
        elif isinstance(entry, URLPattern):
            if route.startswith(("^", "(?P")):  # the admin's regular expressions: an app's list, and what is left
                route = "{app}/" if "app_label" in route else "{anything}"
            yield prefix + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route)
