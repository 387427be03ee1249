"""Clients that do not read: bounded memory, nobody else is slowed, cut after the send timeout."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import BinaryIO

import httpx
import pytest

from sluice.server.gate import WriteGate
from tests.platform.conftest import ServerProcess

pytestmark = pytest.mark.timeout(90)
Start = Callable[..., ServerProcess]
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


TEXT, PING, PONG = 0x1, 0x9, 0xA


def frame(data: str | bytes, opcode: int = TEXT) -> bytes:
    """A masked frame (with a mask of zeros)."""
    data = data.encode() if isinstance(data, str) else data
    return bytes([0x80 | opcode, 0x80 | len(data)]) + bytes(4) + data


def next_frame(stream: BinaryIO, opcode: int) -> bytes:
    """What the next frame of a kind holds; those before it are passed over. All of them are small."""
    while head := stream.read(2):
        data = stream.read(head[1])
        if head[0] == 0x80 | opcode:
            return data
    raise AssertionError("the server has closed the connection")


def open_flood(server: ServerProcess, kind: str, name: str) -> None:
    """A client with a tiny receive buffer that asks for 20 MB and reads none of it."""
    if kind == "sse":
        server.request(b"GET /flood?name=%s&n=20000 HTTP/1.1\r\nHost: x\r\n\r\n" % name.encode(), rcvbuf=4096)
    else:
        sock = server.request(HANDSHAKE, rcvbuf=4096)
        sock.recv(100)
        sock.sendall(frame(f"flood {name} 20000 1000"))


@pytest.mark.parametrize("kind", ["sse", "ws"])
def test_twenty_clients_that_never_read(start: Start, kind: str) -> None:
    server = start(SLUICE_SEND_TIMEOUT="60")
    alone = pace(server)
    before = server.state()["rss"]
    for i in range(20):
        open_flood(server, kind, f"f{i}")
    # The handlers stop by themselves: what they have sent does not move any more.
    stands = server.wait_state(lambda s: len(s["sent"]) == 20 and s["sent"] == server.state()["sent"])
    assert all(size < 5_000_000 for size in stands["sent"].values()), stands["sent"]
    assert stands["rss"] - before < 20 * 1024 * 1024
    # Somebody who reads is not slowed.
    assert pace(server) < alone * 1.5 + 0.005


def pace(server: ServerProcess) -> float:
    """Median seconds between 100 events of a stream of one per 10 ms."""
    with httpx.stream("GET", server.url + "/ticks?n=100&pace=0.01", timeout=30) as response:
        times = [time.monotonic() for line in response.iter_lines() if line.startswith("data")]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("kind", ["sse", "ws"])
def test_cut_after_the_send_timeout_and_counted(start: Start, kind: str) -> None:
    server = start(SLUICE_SEND_TIMEOUT="1")
    open_flood(server, kind, "slow")
    state = server.wait_state(lambda s: s["slow_clients"] == 1, 10)
    state = server.wait_state(lambda s: s["open"] == 1 and s["transports"] == 1, 5)
    assert "flood slow cancelled" in state["events"]
    assert "has not read for 1 s" in server.text()
    assert "sluice_slow_clients_total 1.0" in httpx.get(server.url + "/metrics").text


@pytest.mark.parametrize("kind", ["sse", "ws"])
def test_disconnect_wakes_the_waiting_handler(start: Start, kind: str) -> None:
    server = start()
    open_flood(server, kind, "gone")
    server.wait_state(lambda s: s["sent"].get("gone") and s["sent"] == server.state()["sent"])
    for sock in server._sockets:
        sock.close()
    gone = time.monotonic()
    state = server.wait_state(lambda s: s["open"] == 1)
    assert time.monotonic() - gone < 2
    assert "flood gone cancelled" in state["events"]
    assert state["slow_clients"] == 0


async def test_a_lost_connection_opens_the_gate_for_good() -> None:
    """Consumers cancel what waits there; an application that heeds no disconnect must get on by itself."""
    gate = WriteGate()
    gate.pauseProducing()
    waiting = asyncio.create_task(gate.wait_open())
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.stopProducing()
    await asyncio.wait_for(waiting, 5)
    gate.pauseProducing()  # Twisted may still say so of what was written before
    assert not gate.shut


def test_slow_reader_gets_everything(start: Start) -> None:
    server = start()
    sock = server.request(
        b"GET /flood?name=all&n=3000&size=1000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", rcvbuf=4096
    )
    server.wait_state(lambda s: s["sent"].get("all") and s["sent"] == server.state()["sent"])
    received = bytearray()
    while part := sock.recv(65536):
        received += part
    assert received.count(b"data: " + b"x" * 1000 + b"\n\n") == 3000
    assert received.endswith(b"0\r\n\r\n")


def test_dead_peer_is_found_by_pings_though_we_keep_sending(start: Start) -> None:
    """What the server sends must not count as a sign of life."""
    server = start(SLUICE_WS_PING_INTERVAL="1", SLUICE_WS_PING_TIMEOUT="1")
    sock = server.request(HANDSHAKE)
    sock.recv(100)
    sock.sendall(frame("stream 10000 0.02"))
    sock.settimeout(15)
    began = time.monotonic()
    try:
        while sock.recv(65536):  # reads all of it, and never answers a ping
            pass
    except ConnectionResetError:
        pass
    assert time.monotonic() - began < 1 + 1 + 2 + 1 + 2  # interval, timeout, check period, grace, slack
    state = server.wait_state(lambda s: s["open"] == 1)
    assert state["dead_peers"] == 1
    assert "sluice_dead_peers_total 1.0" in httpx.get(server.url + "/metrics").text


def test_healthy_sockets_survive_a_busy_server(start: Start) -> None:
    """A process that was stopped for longer than the ping timeout finds the pongs before it judges."""
    server = start(SLUICE_WS_PING_INTERVAL="1", SLUICE_WS_PING_TIMEOUT="2")
    sock = server.request(HANDSHAKE)
    stream = sock.makefile("rb")
    assert stream.readline().startswith(b"HTTP/1.1 101")
    while stream.readline() != b"\r\n":
        pass
    for _ in range(2):
        waited_for = next_frame(stream, PING)
        os.kill(server.process.pid, signal.SIGSTOP)
        # Behind more than one read takes in: the time is up before it is read.
        sock.sendall(frame(b"x" * 125, PONG) * 1500 + frame(waited_for, PONG))
        time.sleep(3.5)  # so long a pause is the case itself
        os.kill(server.process.pid, signal.SIGCONT)
    next_frame(stream, PING)  # there is none while an earlier one waits for its pong
    sock.sendall(frame("echo here"))
    assert next_frame(stream, TEXT) == b"here"
    assert server.state()["dead_peers"] == 0


def ping(count: int) -> bytes:
    """Masked pings of 125 bytes."""
    return (bytes([0x89, 0x80 | 125]) + bytes(4) + b"x" * 125) * count


def test_pings_of_a_client_that_never_reads_cost_nothing(start: Start) -> None:
    """Their pongs piled up without bound: the gate holds back handlers, and pongs come from none."""
    server = start(SLUICE_WS_PING_TIMEOUT="60")
    sock = server.request(HANDSHAKE, rcvbuf=4096)
    sock.recv(100)
    before = server.state()["rss"]
    for _ in range(200):
        sock.sendall(ping(1000))
    sock.sendall(frame("hang"))
    server.wait_state(lambda s: any("socket" in name and "hang" in name for name in s["tasks"]), 30)
    assert server.state()["rss"] - before < 12 * 1024 * 1024


def test_large_messages_wait_outside_once_the_consumer_is_behind(start: Start) -> None:
    """256 of them may wait, were they small."""
    server = start()
    sock = server.request(HANDSHAKE, rcvbuf=4096)
    sock.recv(100)
    sock.sendall(frame("flood large 20000 1000"))
    server.wait_state(lambda s: s["sent"].get("large") and s["sent"] == server.state()["sent"])
    before = server.state()["rss"]
    size = 1_000_000
    text = b"echo " + b"x" * (size - 5)
    message = bytes([0x81, 0xFF]) + size.to_bytes(8, "big") + bytes(4) + text
    sock.settimeout(2)
    sent = 0
    try:
        while sent < 100:
            sock.sendall(message)
            sent += 1
    except TimeoutError:
        pass
    assert sent < 20
    assert server.state()["rss"] - before < 30 * 1024 * 1024


def test_requests_ahead_of_a_stream_that_nobody_reads(start: Start) -> None:
    """What comes behind a stream waits for its end, in memory: while its client does not read, not without bound."""
    server = start()
    sock = server.request(b"GET /flood?name=ahead&n=20000 HTTP/1.1\r\nHost: x\r\n\r\n", rcvbuf=4096)
    server.wait_state(lambda s: s["sent"].get("ahead") and s["sent"] == server.state()["sent"])
    before = server.state()["rss"]
    sock.settimeout(5)
    try:
        for _ in range(100):
            sock.sendall(b"x" * 1_000_000)
    except OSError:
        pass
    state = server.wait_state(lambda s: s["open"] == 1, 10)
    assert "flood ahead cancelled" in state["events"]
    assert state["rss"] - before < 20 * 1024 * 1024
    assert state["refusals"]["asks_without_reading"] == 1
