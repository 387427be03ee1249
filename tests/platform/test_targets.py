"""Request targets: a whole address is the path and the host that it names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from twisted.web.http_headers import Headers

from sluice.server import target
from tests.platform.conftest import ServerProcess


def request(uri: bytes, *hosts: bytes, version: bytes = b"HTTP/1.1") -> Any:
    headers = Headers({b"host": list(hosts)} if hosts else {})
    return SimpleNamespace(uri=uri, path=uri.partition(b"?")[0], clientproto=version, requestHeaders=headers)


@pytest.mark.parametrize(
    ("uri", "host", "path", "settled"),
    [
        (b"/v1/models?a=b", b"own", b"/v1/models", b"/v1/models?a=b"),
        (b"http://other:81/v1/models", b"other:81", b"/v1/models", b"/v1/models"),
        (b"HTTPS://[::1]:8/v1/models?a=http://c/d", b"[::1]:8", b"/v1/models", b"/v1/models?a=http://c/d"),
        (b"http://other", b"other", b"/", b"/"),
        (b"http://other?a=b", b"other", b"/", b"/?a=b"),
        (b"http://other//v1/models", b"other", b"//v1/models", b"//v1/models"),
        (b"/http://other/v1", b"own", b"/http://other/v1", b"/http://other/v1"),
        (b"*", b"own", b"*", b"*"),
    ],
)
def test_path_query_and_host_are_those_of_the_target(uri: bytes, host: bytes, path: bytes, settled: bytes) -> None:
    asked = request(uri, b"own")
    assert target.settle(asked) is None
    assert (asked.path, asked.uri) == (path, settled)
    assert asked.requestHeaders.getRawHeaders(b"host") == [host]


@pytest.mark.parametrize(
    "uri", [b"http:///v1", b"http://", b"http://a@b/v1", b"http://a/v1#b", b"http://a#b", b"ftp://a/v1", b"ws://a/v1"]
)
def test_other_addresses_are_refused(uri: bytes) -> None:
    assert "target" in (target.settle(request(uri, b"own")) or "")


def test_there_is_one_host() -> None:
    assert target.settle(request(b"/", version=b"HTTP/1.0")) is None
    for asked in (request(b"/"), request(b"/", b"a", b"b"), request(b"http://a/", b"a", b"a")):
        assert "Host" in (target.settle(asked) or "")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://x/livez", 200),
        (b"HEAD http://x/livez?y=http://z", 200),
        (b"POST http://x/livez", 405),
        (b"GET http://x//livez", 404),
        (b"GET http://x/./livez", 404),
        (b"GET http://x/%6civez", 404),
        (b"GET http://x/livez/", 404),
        (b"POST http://x/guarded/a", 401),
        (b"POST http://x/guarded/%2e", 404),
    ],
)
def test_every_rule_holds_for_a_whole_address(server: ServerProcess, line: bytes, status: int) -> None:
    sock = server.request(line + b" HTTP/1.1\r\nHost: y\r\nConnection: close\r\n\r\n")
    assert sock.recv(100).startswith(b"HTTP/1.1 %d " % status)


def test_a_websocket_may_name_a_whole_address(server: ServerProcess) -> None:
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n"
    head = b"GET http://x:80/ws%s HTTP/1.1\r\nHost: y\r\n" + upgrade % (b"A" * 22 + b"==")
    sock = server.request(head % b"")
    assert sock.recv(20).startswith(b"HTTP/1.1 101 ")
    assert server.request(head % b"?refuse").recv(20).startswith(b"HTTP/1.1 403 ")
