"""The route table: one spelling per path, one rule per route, labels from a closed set."""

from __future__ import annotations

import pytest

from sluice.routes import Route, RouteMatcher, all_routes, is_canonical
from sluice.routing import Labels
from tests.platform.conftest import ServerProcess

CHAT = Route("v1/chat/completions", "x", methods=("POST",))
EVENTS = Route("v1/requests/<str:request_id>/events", "x")


def test_templates_and_allow() -> None:
    assert EVENTS.template == "/v1/requests/{request_id}/events"
    assert EVENTS.allow == "GET, HEAD, OPTIONS"
    assert CHAT.allow == "POST, OPTIONS"


@pytest.mark.parametrize(
    ("path", "raw", "fine"),
    [
        ("/v1/models", b"/v1/models", True),
        ("/v1/requests/a b", b"/v1/requests/a%20b", True),
        ("//v1/models", b"//v1/models", False),
        ("/v1//models", b"/v1//models", False),
        ("/v1/../generate", b"/v1/../generate", False),
        ("/v1/./models", b"/v1/./models", False),
        ("/v1/models/..", b"/v1/models/..", False),
        ("/v1\\models", b"/v1\\models", False),
        ("/v1/models", b"/v1%2fmodels", False),
        ("/v1/models", b"/v1%2Fmodels", False),
        ("/../x", b"/%2e%2e/x", False),
        ("/v1/models\x00", b"/v1/models%00", False),
        ("/%2e", b"/%252e", False),
        ("/v1/models", b"/v1/%6dodels", False),
        ("/v1/models", b"/v%31/models", False),
        ("/v1/models/gr\u00fcn", b"/v1/models/gr%C3%BCn", True),
        ("v1", b"v1", False),
        ("/v1/models", None, True),
    ],
)
def test_canonical_paths(path: str, raw: bytes | None, fine: bool) -> None:
    assert is_canonical(path, raw) is fine


def test_matching_is_exact() -> None:
    matcher = RouteMatcher([CHAT, EVENTS])
    assert matcher.match("http", "/v1/chat/completions") == (CHAT, {})
    assert matcher.match("http", "/v1/requests/r1/events") == (EVENTS, {"request_id": "r1"})
    for path in ("/V1/chat/completions", "/v1/chat/completions/", "/v1/requests/r/1/events", "/v1/chat"):
        assert matcher.match("http", path) is None
    assert matcher.match("websocket", "/v1/chat/completions") is None


def test_labels_come_from_a_closed_set() -> None:
    labels = Labels([CHAT, EVENTS])
    seen = {
        labels({"type": kind, "path": f"/{prefix}{i}"})
        for i in range(200)
        for prefix in ("junk", "v1/requests/", "v1/", "admin/junk")
        for kind in ("http", "websocket")
    }
    assert len(seen) <= 3
    for i in range(100):
        path = f"/v1/requests/{i}/events"
        assert labels({"type": "http", "path": path}) == "/v1/requests/{request_id}/events"


def test_every_route_of_the_product_loads_and_only_health_is_public() -> None:
    routes = all_routes()
    for route in routes:
        assert callable(route.application()), route.template
    public = {route.template for route in routes if route.access == "public"}
    assert public <= {"/livez", "/readyz", "/openapi.json", "/asyncapi.json", "/docs"}
    for route in routes:
        if route.inference:
            assert route.access != "public", route.template


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "path",
    ["/guarded/x", "//guarded/x", "/GUARDED/x", "/guarded/x/", "/a/../guarded/x", "/guarded%2fx", "/%67uarded/x"],
)
@pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "OPTIONS", "PUT"])
def test_no_spelling_reaches_a_guarded_handler(server: ServerProcess, path: str, method: str) -> None:
    raw = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    sock = server.request(raw.encode())
    answer = b""
    while part := sock.recv(4096):
        answer += part
    status = int(answer.split()[1])
    assert status in (401, 403, 404, 405), answer
    assert "echo 0" not in server.state()["events"]


HANDSHAKE = (
    b"GET /ws/echo HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HANDSHAKE.replace(b"Version: 13", b"Version: 99"), 400),
        (HANDSHAKE.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"x"), 400),
        (HANDSHAKE.replace(b"GET", b"POST"), 405),
        (HANDSHAKE + b"Sec-WebSocket-Protocol: a, a\r\n", 400),
        (HANDSHAKE + b"Sec-WebSocket-Protocol: \xe9\r\n", 400),
        (HANDSHAKE + b"Sec-WebSocket-Protocol: sluice.v1%2cx\r\n", 400),
        (HANDSHAKE.replace(b"/ws/echo", b"/ws/nowhere"), 404),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nDaphne-Root-Path: \xff\r\n", 200),
        (b"GET /x/livez HTTP/1.1\r\nHost: localhost\r\nDaphne-Root-Path: /x\r\n", 404),
        (b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"0" * 5000 + b"\r\n", 400),
    ],
    ids=["version", "key", "POST", "protocol twice", "protocol beyond ASCII", "protocol encoded", "no such socket",
         "mount point of bytes", "mount point", "endless length"],
)  # fmt: skip
def test_odd_heads_are_refused_exactly(server: ServerProcess, head: bytes, status: int) -> None:
    sock = server.request(head + b"\r\n")
    sock.settimeout(10)
    answer = b""
    while b"\r\n\r\n" not in answer and (part := sock.recv(4096)):
        answer += part
    assert answer and int(answer.split()[1]) == status, answer
