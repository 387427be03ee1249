"""Every path has a rule, the rule holds in whatever way the path is spelled, and the documentation lists it."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.management import call_command

from sluice import routetable
from sluice.asgi import application
from sluice.routes import all_routes
from tests.apps.accounts.test_every_page import PUBLIC
from tests.conftest import ROOT

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "QUERY")
GUARDED = [r for r in all_routes() if r.access != "public"]


def test_every_row_has_a_rule() -> None:
    rows = routetable.table()
    assert len(rows) > 50
    for path, methods, rule in rows:
        assert path.startswith("/") and methods and rule, (path, methods, rule)
    assert set(routetable.OPEN_VIEWS) == PUBLIC, "the walk over Django's pages knows the same open ones"
    assert {r.access for r in all_routes()} <= set(routetable.MEANING)


def test_documentation_has_the_table() -> None:
    out = StringIO()
    call_command("routes", stdout=out)
    text = (ROOT / "docs/security.md").read_text()
    assert out.getvalue().strip() in text, "docs/security.md is behind: paste the output of `manage.py routes`"


def spellings(path: str) -> Iterator[tuple[str, bytes]]:
    """(path, raw path), as a server would hand them on."""
    plain = [
        path, "/" + path, path + "/", path.upper(), path.capitalize(), path + "//", path.replace("/", "//"),
        "/." + path, "/x/.." + path, path + "/.", path + "/..", path.replace("/", "\\"), path + "\x00", path + ";x=1",
        path + ".json", path + " ", path + "\t", "/" + path.strip("/") + "\u2215", path.removeprefix("/"), "*",
        f"http://localhost{path}",
    ]  # fmt: skip
    for text in plain:
        yield text, text.encode()
    encoded = {
        path: path.replace("/", "%2f", 2).encode(),
        path + "/": (path + "%2F").encode(),
        path + ".": (path + "%2e").encode(),
        path + "%": (path + "%25").encode(),
    }
    first = f"/%{ord(path[1]):02x}"
    yield path, (first + path[2:]).encode()
    yield from encoded.items()


async def ask(kind: str, method: str, path: str, raw: bytes) -> int:
    """The status that a stranger gets; for a WebSocket 101 where it is accepted, else 403."""
    scope: dict[str, Any] = {
        "type": kind, "path": path, "raw_path": raw, "query_string": b"", "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1), "server": ("localhost", 80), "http_version": "1.1", "asgi": {"version": "3.0"},
        "scheme": "http" if kind == "http" else "ws", "subprotocols": [],
    }  # fmt: skip
    if kind == "http":
        scope["method"] = method
    app = ApplicationCommunicator(application, scope)
    first = {"type": "http.request", "body": b"{}"} if kind == "http" else {"type": "websocket.connect"}
    await app.send_input(first)
    try:
        start = await app.receive_output(20)
        if kind == "websocket":
            return 101 if start["type"] == "websocket.accept" else 403
        while (await app.receive_output(20)).get("more_body"):
            pass
        await app.wait(20)
        return int(start["status"])
    finally:
        app.stop(exceptions=False)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("route", GUARDED, ids=lambda r: f"{r.kind}:{r.path}")
async def test_no_method_and_no_spelling_gets_a_stranger_in(route: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight into the application, before which a real server already refuses some of these."""

    async def nothing() -> None:
        return None

    monkeypatch.setattr("sluice.runtime.ensure_started", nothing)
    path = route.template.replace("{", "").replace("}", "")
    calls = 0
    for spelled, raw in spellings(path):
        for method in METHODS if route.kind == "http" else ("GET",):
            status = await ask(route.kind, method, spelled, raw)
            calls += 1
            assert status in (301, 302, 400, 401, 403, 404, 405, 501), (method, spelled, raw, status)
            if (spelled, raw) == (path, path.encode()) and method in route.methods:
                assert status in (401, 403), (method, status)
    assert calls >= 26
