"""Request targets, where a whole address is the path and the host that it names; the address that a proxy adds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from twisted.web.http_headers import Headers
from websockets.asyncio.client import connect

from inference.embedded import EmbeddedValkey
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


@pytest.mark.parametrize(
    ("lines", "believed"),
    [
        ([b"203.0.113.7"], b"203.0.113.7"),
        ([b"127.0.0.1, 203.0.113.7"], b"203.0.113.7"),
        ([b"127.0.0.1", b"203.0.113.7"], b"203.0.113.7"),
        ([b"127.0.0.1, 10.0.0.1", b"10.0.0.2,2001:db8::7"], b"2001:db8::7"),
        ([b"203.0.113.7", b""], b"unknown"),
        ([b"203.0.113.7, \xff"], b"unknown"),
    ],
)
def test_the_nearest_proxy_says_who_calls(lines: list[bytes], believed: bytes) -> None:
    asked = request(b"/", b"own")
    asked.requestHeaders.setRawHeaders(b"x-forwarded-for", lines)
    target.believe_nearest(asked)
    assert asked.requestHeaders.getRawHeaders(b"x-forwarded-for") == [believed]


async def test_no_client_chooses_the_address_that_it_comes_from(
    tmp_path: Path, valkey: EmbeddedValkey, var_dir: Path
) -> None:
    """Guessing passwords is slowed by address: with a new one for each guess nothing was slowed."""
    added = {"X-Forwarded-For": "198.51.100.1, 203.0.113.7"}
    behind = ServerProcess(tmp_path / "log", valkey.url, var_dir, SLUICE_BEHIND_PROXY="1")
    plain = ServerProcess(tmp_path / "plain", valkey.url, var_dir)
    try:
        for server, client in ((behind, "203.0.113.7"), (plain, "127.0.0.1")):
            server.wait_ready()
            assert httpx.get(f"{server.url}/state", headers=added).json()["client"][0] == client
            odd = [(b"X-Forwarded-For", b"203.0.113.7"), (b"X-Forwarded-Proto", b"\xff")]
            assert httpx.get(f"{server.url}/state", headers=odd).status_code == 200
            async with connect(f"ws{server.url.removeprefix('http')}/ws", additional_headers=added) as socket:
                assert await socket.recv() == "open"
                await socket.send("client")
                assert await socket.recv() == client
    finally:
        behind.close()
        plain.close()
