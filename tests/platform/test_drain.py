"""The drain, by real signals on real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as ws_connect

from tests.conftest import ROOT
from tests.platform.conftest import ServerProcess
from tests.support import eventually_sync

pytestmark = pytest.mark.timeout(90)
Start = Callable[..., ServerProcess]


class Reader(threading.Thread):
    """Reads an event stream in the background and notes when each event came."""

    def __init__(self, server: ServerProcess, query: str) -> None:
        super().__init__(daemon=True)
        self.url = f"{server.url}/ticks?{query}"
        self.events: list[str] = []
        self.times: list[float] = []
        self.error: Exception | None = None
        self.ended = 0.0
        self.first = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("GET", self.url, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:])
                        self.times.append(time.monotonic())
                        self.first.set()
        except (httpx.HTTPError, OSError) as exc:
            self.error = exc
        self.ended = time.monotonic()

    @property
    def complete(self) -> bool:
        return self.error is None and bool(self.events) and self.events[-1] == "[DONE]"


def readiness(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(server.url + "/readyz", timeout=10).json()


def test_order_of_a_drain(start: Start) -> None:
    server = start("--pre-drain", "1.5", "--drain-deadline", "20")
    stream = Reader(server, "n=60&pace=0.1")
    assert stream.first.wait(10)
    sent = server.signal(signal.SIGTERM)

    # Pausing: not ready, alive, and everything is still accepted.
    eventually_sync(lambda: readiness(server)["state"] == "pausing", 1.0)
    assert httpx.get(server.url + "/livez").status_code == 200
    during = httpx.get(server.url + "/ticks?n=1")
    assert during.status_code == 200
    assert during.headers["connection"] == "close"

    # Refusing: 503 for new work; health and metrics are still answered.
    eventually_sync(lambda: readiness(server)["state"] == "finishing", 3.0)
    assert time.monotonic() - sent >= 1.5
    refused = httpx.get(server.url + "/ticks?n=1")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "shutting_down"
    assert httpx.get(server.url + "/livez").status_code == 200
    assert httpx.get(server.url + "/metrics").status_code == 200

    # Finishing: the running stream is untouched, and the process leaves right after it.
    assert server.wait() == 0
    stream.join(5)
    assert stream.complete, stream.error
    assert len(stream.events) == 61
    assert time.monotonic() - stream.ended < 1.5


def test_pace_of_running_streams_is_unchanged(start: Start) -> None:
    server = start("--pre-drain", "1", "--drain-deadline", "20")
    streams = [Reader(server, "n=100&pace=0.05") for _ in range(4)]
    assert all(stream.first.wait(10) for stream in streams)
    # Events before the signal, to compare with.
    eventually_sync(lambda: all(len(stream.times) > 20 for stream in streams), 20)
    sent = server.signal(signal.SIGTERM)
    assert server.wait() == 0
    for stream in streams:
        stream.join(5)
        assert stream.complete, stream.error
        gaps = [(b, b - a) for a, b in zip(stream.times, stream.times[1:], strict=False)]
        before = statistics.median(gap for at, gap in gaps if at < sent)
        after = statistics.median(gap for at, gap in gaps if at > sent)
        assert after < before * 1.5


def test_idle_connections_are_closed_at_once_and_busy_ones_after_their_answer(start: Start) -> None:
    server = start("--pre-drain", "0.3", "--drain-deadline", "20")
    idle = server.connect()
    kept = server.request(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b'"live"' in kept.recv(4096)
    with (
        ws_connect(server.url.replace("http", "ws") + "/ws") as quiet,
        ws_connect(server.url.replace("http", "ws") + "/ws") as busy,
    ):
        assert quiet.recv(5) == "open"
        assert busy.recv(5) == "open"
        busy.send("stream 30 0.1")
        assert busy.recv(5) == "0"
        sent = server.signal(signal.SIGTERM)
        assert idle.recv(1) == b""
        assert kept.recv(1) == b""
        with pytest.raises(ConnectionClosed) as closed:
            quiet.recv(5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        assert time.monotonic() - sent < 2
        received = [busy.recv(5) for _ in range(30)]
        assert received[-1] == "done"
        with pytest.raises(ConnectionClosed) as closed:
            busy.recv(5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    assert server.wait() == 0


def test_a_request_on_its_way_as_the_drain_begins_is_answered(start: Start) -> None:
    """Its connection stands, and nothing has come on it: closed now, the client would have no answer at all."""
    server = start("--pre-drain", "0", "--drain-deadline", "20")
    stream = Reader(server, "n=40&pace=0.1")
    assert stream.first.wait(10)
    fresh, unused = server.connect(), server.connect()
    server.state()  # asked on a later connection: both have been taken
    server.signal(signal.SIGTERM)
    eventually_sync(lambda: "server is finishing" in server.text(), 5.0, every=0.002)
    fresh.sendall(b"GET /ticks?n=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = fresh.recv(4096)
    assert answer.startswith(b"HTTP/1.1 503"), answer
    assert b"shutting_down" in answer
    assert unused.recv(1) == b""
    assert not stream.ended  # long before the process leaves
    assert server.wait() == 0


def test_new_sockets_are_refused_with_503(start: Start) -> None:
    server = start("--pre-drain", "0", "--drain-deadline", "20")
    stream = Reader(server, "n=40&pace=0.1")
    assert stream.first.wait(10)
    server.signal(signal.SIGTERM)
    eventually_sync(lambda: readiness(server)["state"] == "finishing", 2.0)
    with pytest.raises(InvalidStatus) as refused:
        ws_connect(server.url.replace("http", "ws") + "/ws")
    assert refused.value.response.status_code == 503
    assert "retry-after" in refused.value.response.headers
    assert server.wait() == 0


def test_at_the_deadline_streams_get_an_error_event_and_sockets_1012(start: Start) -> None:
    server = start("--pre-drain", "0.2", "--drain-deadline", "1")
    stream = Reader(server, "n=1000&pace=0.1")
    pending: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: pending.append(httpx.post(server.url + "/hang?name=a", timeout=30)), daemon=True
    )
    waiting.start()
    server.wait_state(lambda state: "hang a entered" in state["events"])
    assert stream.first.wait(10)
    with ws_connect(server.url.replace("http", "ws") + "/ws") as socket_:
        socket_.recv(5)
        socket_.send("hang")
        sent = server.signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            socket_.recv(20)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    assert server.wait() == 0
    assert time.monotonic() - sent < 0.2 + 1 + 5
    stream.join(5)
    assert stream.error is None
    assert json.loads(stream.events[-1])["error"]["code"] == "shutting_down"
    waiting.join(5)
    assert pending[0].status_code == 503
    assert pending[0].json()["error"]["code"] == "shutting_down"


def test_total_is_bounded_whatever_is_open(start: Start) -> None:
    """Clients that never read, sockets that never answer a close, a request that is half sent."""
    server = start("--pre-drain", "0.5", "--drain-deadline", "1")
    socks = [server.request(b"GET /flood?name=f%d HTTP/1.1\r\nHost: x\r\n\r\n" % i, rcvbuf=4096) for i in range(5)]
    socks.append(server.request(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc"))
    socks.append(server.request(b"GET /hang?name=h HTTP/1.1\r\nHost: x\r\n\r\n"))
    server.wait_state(lambda state: state["open"] >= 7)
    sent = server.signal(signal.SIGTERM)
    assert server.wait(20) == 0
    assert time.monotonic() - sent < 0.5 + 1 + 5
    assert len(socks) == 7


def test_second_sigterm_skips_the_waiting(start: Start) -> None:
    server = start("--pre-drain", "30", "--drain-deadline", "60")
    stream = Reader(server, "n=1000&pace=0.1")
    assert stream.first.wait(10)
    server.signal(signal.SIGTERM)
    eventually_sync(lambda: readiness(server)["state"] == "pausing", 2.0)
    again = server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - again < 5
    stream.join(5)
    assert json.loads(stream.events[-1])["error"]["code"] == "shutting_down"


def test_sigint_skips_the_pause_only(start: Start) -> None:
    server = start("--pre-drain", "30", "--drain-deadline", "30")
    stream = Reader(server, "n=20&pace=0.1")
    assert stream.first.wait(10)
    sent = server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert time.monotonic() - sent < 10
    stream.join(5)
    assert stream.complete, stream.error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("delay", [0.05, 0.3, 0.6])
def test_signal_during_start_up(start: Start, number: int, delay: float) -> None:
    server = start(ready=False)
    time.sleep(delay)  # the moment is what is tested, not waited for
    sent = server.signal(number)
    code = server.wait(10)
    # Before our handler stands, the interpreter's own answer; later an orderly exit. Never a hang.
    assert code in (0, -number, 130)
    assert time.monotonic() - sent < 8
    assert "Traceback" not in server.text() or number == signal.SIGINT


def test_signal_while_redis_does_not_answer_at_start(start: Start) -> None:
    """A Redis that accepts and says nothing: start-up hangs in it, and SIGTERM still ends the process."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        server = start(ready=False, redis_url=f"redis://127.0.0.1:{port}/0", SLUICE_REDIS_TIMEOUT="60")
        deaf.settimeout(30)
        accepted, _ = deaf.accept()
        sent = server.signal(signal.SIGTERM)
        assert server.wait(10) == 0
        assert time.monotonic() - sent < 5
        accepted.close()


def test_redis_dies_before_the_signal(start: Start, fresh_valkey: Callable[[], Any]) -> None:
    redis = fresh_valkey()
    server = start("--pre-drain", "0.2", "--drain-deadline", "2", redis_url=redis.url)
    redis.stop()
    eventually_sync(lambda: "redis does not answer" in readiness(server)["reasons"], 10.0)
    sent = server.signal(signal.SIGTERM)
    assert server.wait(20) == 0
    assert time.monotonic() - sent < 0.2 + 2 + 5


def test_redis_stands_still_while_streams_are_open(start: Start, fresh_valkey: Callable[[], Any]) -> None:
    """It takes every question and answers none. Before, the drain took too long, and its watchdog ended it with 1."""
    redis = fresh_valkey()
    server = start("--pre-drain", "0.2", "--drain-deadline", "2", redis_url=redis.url)
    stream = Reader(server, "n=1000&pace=0.1")
    assert stream.first.wait(10)
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        os.kill(redis.pid, signal.SIGCONT)


def test_drain_log_names_what_is_open(start: Start) -> None:
    server = start("--pre-drain", "0", "--drain-deadline", "1")
    with httpx.stream("GET", server.url + "/ticks?n=1000&pace=0.1", headers={"x-request-id": "find-me"}):
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    line = next(line for line in server.text().splitlines() if "draining (finishing)" in line)
    assert re.search(r"\d+ s left", line)
    assert "sse /ticks=1" in line
    assert "find-me" in line


def manage(redis_url: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "REDIS_URL": redis_url, "SLUICE_MODELS": "scripted=scripted:rate=200"}
    command = [sys.executable, "manage.py", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)


def test_drain_by_command_and_back(start: Start, fresh_valkey: Callable[[], Any]) -> None:
    redis = fresh_valkey()
    server = start("--pre-drain", "0.2", redis_url=redis.url)
    (line,) = manage(redis.url, "drain").stdout.splitlines()
    assert f"pid {server.process.pid}  serving" in line
    name = line.split()[0]
    assert "told to drain" in manage(redis.url, "drain", name).stdout
    eventually_sync(lambda: readiness(server)["state"] == "finishing", 5.0)
    assert httpx.get(server.url + "/ticks?n=1").status_code == 503
    assert "finishing" in manage(redis.url, "drain").stdout
    manage(redis.url, "drain", "--all", "--undo")
    eventually_sync(lambda: readiness(server)["state"] == "serving", 5.0)
    assert httpx.get(server.url + "/ticks?n=1").status_code == 200
    assert manage(redis.url, "drain", "nobody").returncode == 1


def test_stuck_thread_does_not_hold_up_the_exit(start: Start) -> None:
    server = start("--pre-drain", "0", "--drain-deadline", "20")
    assert httpx.get(server.url + "/stick").status_code == 200
    sent = server.signal(signal.SIGTERM)
    assert server.wait(15) == 0
    assert time.monotonic() - sent < 5
