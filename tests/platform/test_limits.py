"""Sizes, deadlines and caps: refused early, with an answer that arrives."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as ws_connect

from sluice.server.http import SPARE
from tests.platform.conftest import ServerProcess
from tests.support import eventually_sync

pytestmark = pytest.mark.timeout(60)
Start = Callable[..., ServerProcess]
LIMIT = 4 * 1024 * 1024


def answer(sock: socket.socket) -> tuple[int, dict[str, str], dict]:  # type: ignore[type-arg]
    """Status, headers and JSON body of the one response on a connection that then closes."""
    raw = b""
    while part := sock.recv(65536):
        raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, json.loads(body)


def test_body_at_the_limit_passes(server: ServerProcess) -> None:
    assert httpx.post(server.url + "/echo", content=b"x" * LIMIT).json() == {"length": LIMIT}


def test_declared_body_over_the_limit_is_refused_before_it_is_sent(server: ServerProcess) -> None:
    sock = server.request(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nabc" % (LIMIT + 1))
    status, headers, body = answer(sock)
    assert status == 413
    assert headers["connection"] == "close"
    assert body["error"]["code"] == "body_too_large"


def test_refusal_reaches_a_client_that_sends_it_all(server: ServerProcess) -> None:
    before = server.state()["rss"]
    response = httpx.post(server.url + "/echo", content=b"x" * (27 * 1024 * 1024))
    assert response.status_code == 413
    assert server.state()["rss"] - before < 8 * 1024 * 1024


def test_chunked_body_over_the_limit_is_refused_on_the_way(server: ServerProcess) -> None:
    sock = server.request(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n" % 65536 + b"x" * 65536 + b"\r\n"
    try:
        for _ in range(80):
            sock.sendall(chunk)
    except OSError:
        pass
    status, _, body = answer(sock)
    assert status == 413
    assert body["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "extra",
    [b"X-Big: " + b"x" * 20_000 + b"\r\n", b"".join(b"X-%d: y\r\n" % i for i in range(150))],
    ids=["large", "many"],
)
def test_large_headers_are_refused(server: ServerProcess, extra: bytes) -> None:
    sock = server.request(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + extra + b"\r\n")
    status, _, body = answer(sock)
    assert status == 431
    assert body["error"]["code"] == "headers_too_large"


def test_long_path_is_refused(server: ServerProcess) -> None:
    status, _, _ = answer(server.request(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert status == 431


@pytest.mark.parametrize(
    "raw",
    [b"GET", b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: ", b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nab"],
    ids=["line", "headers", "body"],
)
def test_slow_request_is_ended_however_it_trickles(start: Start, raw: bytes) -> None:
    server = start(SLUICE_READ_TIMEOUT="1")
    sock = server.request(raw)
    began = time.monotonic()
    sock.settimeout(0.2)
    received = b""
    while time.monotonic() - began < 10:
        try:
            part = sock.recv(4096)
        except TimeoutError:
            if b"Content-Length: 5" not in raw:
                sock.sendall(b"a")
            continue
        if not part:
            break
        received += part
    assert received.startswith(b"HTTP/1.1 408")
    assert 0.8 < time.monotonic() - began < 5
    server.wait_state(lambda s: s["transports"] == 1)


def test_keep_alive_and_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    one = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
    sock = server.request(
        one % (1, b"a") + one % (2, b"ab") + one.replace(b"Host", b"Connection: close\r\nHost") % (3, b"abc")
    )
    raw = b""
    while part := sock.recv(4096):
        raw += part
    assert [raw.index(b'{"length":%d}' % n) for n in (1, 2, 3)] == sorted(
        raw.index(b'{"length":%d}' % n) for n in (1, 2, 3)
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/2.0\r\nHost: x\r\n\r\n",
        b"G(T /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET  /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nno colon\r\nHost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX Y: z\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: \x00\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1x\r\n\r\na",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\na",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\na\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET http:///livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://me@x/livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x/livez#top HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET ftp://x/livez HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=lambda raw: repr(raw)[2:60],
)
def test_what_is_no_http_is_refused_in_words_and_nothing_runs(server: ServerProcess, raw: bytes) -> None:
    before = server.state()["events"]
    status, headers, body = answer(server.request(raw + b"POST /echo HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert status == 400
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert body["error"]["code"] == "bad_request"
    assert server.state()["events"] == before


def test_connections_over_the_cap_are_told_so(start: Start) -> None:
    server = start("--max-connections", "5")
    held = [server.connect() for _ in range(4)]
    server.wait_state(lambda s: s["transports"] == 5)
    held.append(server.connect())
    # The kernel accepts in order: once the sixth is answered, the fifth has been taken.
    status, headers, body = answer(server.request(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert status == 503
    assert headers["retry-after"] == "1"
    assert headers["connection"] == "close"
    assert body["error"]["code"] == "too_many_connections"
    for sock in held:
        sock.close()
    server.wait_state(lambda s: s["transports"] == 1)


def test_a_full_server_is_still_alive(start: Start) -> None:
    """Refusing the liveness probe too would have it killed, and every stream with it."""
    server = start("--max-connections", "5")
    held = [server.connect() for _ in range(4)]
    server.wait_state(lambda s: s["transports"] == 5)
    held.append(server.connect())
    for path in (b"/livez", b"/readyz?verbose=1"):
        _, headers, body = answer(server.request(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path))
        assert "too_many_connections" not in str(body), path
        assert headers["connection"] == "close", "a connection kept open would be one too many"
    held += [server.connect() for _ in range(SPARE)]
    status, _, body = answer(server.connect())
    assert (status, body["error"]["code"]) == (503, "too_many_connections"), "the spare ones have an end too"
    live = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    eventually_sync(lambda: answer(server.request(live))[0] == 200, what="those that asked nothing are closed")
    for sock in held:
        sock.close()


def test_methods(server: ServerProcess) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "BREW"):
        response = httpx.request(method, server.url + "/echo")
        assert response.status_code == 405, method
        assert response.headers["allow"] == "POST, OPTIONS"
        assert response.json()["error"]["code"] == "method_not_allowed"
    options = httpx.options(server.url + "/echo")
    assert (options.status_code, options.headers["allow"]) == (204, "POST, OPTIONS")
    head = httpx.head(server.url + "/livez")
    assert (head.status_code, head.content) == (200, b"")


def test_odd_websocket_messages(start: Start) -> None:
    server = start(SLUICE_WS_MAX_MESSAGE_BYTES="100000")
    url = server.url.replace("http", "ws") + "/ws"
    with ws_connect(url, subprotocols=["other", "sluice.v1"]) as sock:
        assert sock.subprotocol == "sluice.v1"
        assert sock.recv(5) == "open"
        sock.send("stream 20 0.02")
        sock.send("fail")
        for i in range(1000):
            sock.send(f"echo {i}")
        received = [sock.recv(5) for _ in range(20 + 1 + 1 + 1000)]
        assert received.count("error") == 1
        assert "done" in received
        assert [m for m in received if m.isdigit() and int(m) >= 20] == [str(i) for i in range(20, 1000)]
    for payload, code in ((b"\x00", 1003), ("x" * 100_001, 1009)):
        with ws_connect(url) as sock:
            sock.recv(5)
            sock.send(payload)
            with pytest.raises(ConnectionClosed) as closed:
                sock.recv(5)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == code
    assert "secret detail" in server.text()  # in the log only
    server.wait_state(lambda s: s["open"] == 1)
