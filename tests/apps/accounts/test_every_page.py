"""Walks every Django page there is: without signing in, none but those listed here shows or does anything."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse

pytestmark = pytest.mark.django_db

PUBLIC = {
    "/accounts/login/",
    "/admin/login/",
    "/favicon.ico",
    # Anybody may sign out; that shows nothing and changes nothing for somebody who never signed in.
    "/accounts/logout/",
    "/admin/logout/",
}
METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "trace")
SAMPLES = {"str": "x", "slug": "x", "int": "1", "path": "x", "uuid": str(uuid.UUID(int=1))}


def all_paths(patterns: Any = None, prefix: str = "/") -> Iterator[str]:
    for entry in get_resolver().url_patterns if patterns is None else patterns:
        route = str(entry.pattern)
        for name, converter in entry.pattern.converters.items():
            kind = type(converter).__name__.removesuffix("Converter").lower().replace("string", "str")
            route = route.replace(f"<{kind}:{name}>", SAMPLES.get(kind, "x")).replace(f"<{name}>", "x")
        if isinstance(entry, URLResolver):
            yield from all_paths(entry.url_patterns, prefix + route)
        elif isinstance(entry, URLPattern):
            if route.startswith("^"):  # a regular expression: the admin's app list, and its catch-all
                route = "accounts/" if "app_label" in route else "anything"
            yield prefix + route


PATHS = sorted(set(all_paths()))


def test_the_walk_finds_the_pages() -> None:
    for name in ("admin:index", "admin:inflight_inflightrequest_changelist", "api_keys", "login"):
        assert reverse(name) in PATHS
    assert len(PATHS) > 40


@pytest.mark.parametrize("path", [p for p in PATHS if p not in PUBLIC])
def test_a_stranger_gets_nowhere(path: str) -> None:
    client = Client(raise_request_exception=False)
    for spelled in {path, path.rstrip("/") or "/", path + "?next=/admin/", path.upper()}:
        for method in METHODS:
            reply = getattr(client, method)(spelled)
            where = (method, spelled, reply.status_code)
            assert reply.status_code in (301, 302, 401, 403, 404, 405), where
            if reply.status_code == 302:
                assert "/login/" in reply["Location"], where
            if reply.status_code == 301:
                assert reply["Location"].startswith(path), where
            assert b"csrfmiddlewaretoken" not in reply.content, where


def test_public_pages_show_a_form_or_lead_to_one() -> None:
    for path in PUBLIC:
        reply = Client().get(path)
        assert reply.status_code in (200, 302, 405), path
        if reply.status_code == 302:
            assert reply["Location"].startswith(("/static/", "/accounts/login/", "/admin/")), path


def test_sign_up_is_off() -> None:
    assert not [p for p in PATHS if "signup" in p or "register" in p]
