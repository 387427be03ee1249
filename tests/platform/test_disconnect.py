"""A client that goes is noticed at once, its handler cleans up, and nothing of it stays."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable

import httpx
import pytest
from websockets.sync.client import connect as ws_connect

from tests.platform.conftest import ServerProcess

Start = Callable[..., ServerProcess]

pytestmark = pytest.mark.timeout(60)
numbers = itertools.count()

#: Within which the consequences of a disconnect must be over, seconds, on a busy test machine.
LIMIT = 2.0
HANDSHAKE = (
    b"GET /ws%s HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("end", [socket.socket.close, reset, half_close], ids=["close", "reset", "half-close"])
def test_handler_that_waits_is_cancelled_at_once(server: ServerProcess, end) -> None:  # type: ignore[no-untyped-def]
    name = f"n{next(numbers)}"
    sock = server.request(b"GET /hang?name=%s HTTP/1.1\r\nHost: x\r\n\r\n" % name.encode())
    server.wait_state(lambda s: f"hang {name} entered" in s["events"])
    gone = time.monotonic()
    end(sock)
    state = server.wait_state(lambda s: f"hang {name} cleaned" in s["events"])
    assert time.monotonic() - gone < LIMIT
    assert state["open"] == 1


@pytest.mark.parametrize("end", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"POST /ha",
        b"POST /hang?name=early HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n",
        b"POST /hang?name=early HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n0123456789",
        b"POST /hang?name=early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01",
    ],
    ids=["nothing", "half a line", "headers", "half a body", "half a chunk"],
)
def test_close_before_the_request_is_complete(server: ServerProcess, raw: bytes, end) -> None:  # type: ignore[no-untyped-def]
    end(server.request(raw))
    state = server.wait_state(lambda s: s["open"] == 1 and s["transports"] == 1 and s["connections"] == 1)
    assert "hang early entered" not in state["events"]


def test_close_right_after_the_request(server: ServerProcess) -> None:
    """The handler is entered or it is not; if it is, it cleans up."""
    for _ in range(50):
        name = f"n{next(numbers)}"
        sock = server.request(b"GET /hang?name=%s HTTP/1.1\r\nHost: x\r\n\r\n" % name.encode())
        sock.close()
    state = server.wait_state(lambda s: s["open"] == 1 and s["transports"] == 1)
    events = state["events"]
    entered = [e.split()[1] for e in events if e.startswith("hang n") and e.endswith("entered")]
    cleaned = [e.split()[1] for e in events if e.startswith("hang n") and e.endswith("cleaned")]
    assert entered == cleaned or sorted(entered) == sorted(cleaned)
    assert "took too long" not in server.text()


@pytest.mark.parametrize("ticks", [0, 1, 2, 10, 30])
def test_stream_is_cancelled_at_once(server: ServerProcess, ticks: int) -> None:
    before = server.state()["events"].count("ticks cancelled")
    socks = [server.request(b"GET /ticks?n=10000&pace=0.01 HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(20)]
    server.wait_state(lambda s: s["exchanges"].get("sse /ticks") == 20)
    read = b""
    while read.count(b"data: ") < ticks:
        read += socks[-1].recv(65536)
    gone = time.monotonic()
    for sock in socks:
        sock.close()
    state = server.wait_state(lambda s: s["open"] == 1)
    assert time.monotonic() - gone < LIMIT
    assert state["events"].count("ticks cancelled") == before + 20


def test_nothing_is_left_of_many_mixed_endings(server: ServerProcess) -> None:
    def settled(state):  # type: ignore[no-untyped-def]
        return state["open"] == 1 and state["transports"] == 1 and state["connections"] == 1

    before = server.wait_state(settled)
    for i in range(100):
        raw = (
            b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
            % (
                b"ticks?n=3&pace=0",
                b"hang?name=mixed",
                b"fail?after=1",
                b"abandon",
                b"silent",
            )[i % 5]
        )
        sock = server.request(raw)
        if i % 5 != 1:
            sock.recv(100)
        sock.close()
    after = server.wait_state(settled)
    # Tasks of a connection carry its request's id; the rest are the process's own.
    assert len(after["tasks"]) <= len(before["tasks"]) + 1
    assert after["fds"] <= before["fds"] + 1


def test_socket_tasks_end_with_their_socket(server: ServerProcess) -> None:
    before = server.state()["events"].count("socket task cleaned")
    for _ in range(10):
        with ws_connect(server.url.replace("http", "ws") + "/ws") as sock:
            sock.recv(5)
            sock.send("hang")
            sock.send("echo still heard")
            assert sock.recv(5) == "still heard"
    state = server.wait_state(lambda s: s["open"] == 1)
    assert state["events"].count("socket task cleaned") == before + 10
    assert any(e.startswith("socket closed 1000 with 0 tasks") for e in state["events"])


def test_a_handshake_that_is_not_answered_is_given_up(start: Start) -> None:
    """After SLUICE_READ_TIMEOUT, here 1 s. Daphne's own limit of 5 s would drop clients while many are greeted."""
    server = start(SLUICE_READ_TIMEOUT="1")
    sock = server.request(
        b"GET /ws?wait HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    sock.settimeout(4)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1000) == b""
    server.wait_state(lambda s: s["open"] == 1, 30)  # what does not hear of it is cancelled after 10 s


def test_handshakes_that_leave_at_once_or_are_refused_leave_nothing(server: ServerProcess) -> None:
    before = server.state()
    for i in range(200):
        sock = server.request(HANDSHAKE % (b"?refuse" if i % 2 else b""))
        if i % 4 < 2:
            sock.recv(100)
        sock.close()
    state = server.wait_state(lambda s: s["open"] == 1 and s["transports"] == 1 and s["connections"] == 1)
    assert state["fds"] <= before["fds"] + 1
    assert len(state["tasks"]) <= len(before["tasks"]) + 1
    # The accept path still works.
    with ws_connect(server.url.replace("http", "ws") + "/ws") as sock:
        assert sock.recv(5) == "open"


def test_failures_say_nothing_of_the_inside(server: ServerProcess) -> None:
    response = httpx.get(server.url + "/fail", headers={"x-request-id": "find-fail"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    after = httpx.get(server.url + "/fail?after=1")
    assert '"internal_error"' in after.text.splitlines()[-2]
    assert "secret" not in after.text
    assert httpx.get(server.url + "/silent").status_code == 500
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(server.url + "/abandon")
    errors = [line for line in server.text().splitlines() if "find-fail" in line]
    assert any("ERROR" in line for line in errors)
