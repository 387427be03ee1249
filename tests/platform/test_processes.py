"""Several server processes on one socket: crash restart, rolling reload, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from inference.embedded import EmbeddedValkey
from tests.conftest import ROOT
from tests.platform.conftest import ServerProcess
from tests.support import eventually_sync

pytestmark = pytest.mark.timeout(120)
Start = Callable[..., ServerProcess]


def pids(server: ServerProcess, tries: int = 40) -> set[int]:
    """The processes that answer; each request is a connection of its own."""
    return {server.state()["pid"] for _ in range(tries)}


def test_both_processes_answer_and_a_killed_one_is_replaced(start: Start) -> None:
    server = start("--processes", "2", "--pre-drain", "0.2")
    eventually_sync(lambda: len(pids(server)) == 2, 20)
    first = pids(server)
    victim = first.pop()
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        try:
            now = pids(server)
        except httpx.TransportError:  # a connection that the killed one had accepted
            return False
        return len(now) == 2 and victim not in now

    eventually_sync(replaced, 20)
    server.signal(signal.SIGTERM)
    assert server.wait(20) == 0


class Load(threading.Thread):
    """Short requests on fresh and kept connections, until told to stop; every failure is kept."""

    def __init__(self, server: ServerProcess, *, keep: bool) -> None:
        super().__init__(daemon=True)
        self.server, self.keep = server, keep
        self.done = threading.Event()
        self.failures: list[str] = []
        self.count = 0
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self.server.url, timeout=20) as kept:
            while not self.done.is_set():
                try:
                    if self.keep:
                        response = kept.get("/ticks?n=5&pace=0.02")
                    else:
                        response = httpx.get(self.server.url + "/ticks?n=5&pace=0.02", timeout=20)
                    if response.status_code != 200 or not response.text.endswith("[DONE]\n\n"):
                        self.failures.append(f"{response.status_code} {response.text[-100:]}")
                except httpx.HTTPError as exc:
                    self.failures.append(repr(exc))
                self.count += 1


def test_rolling_reload_fails_no_request(start: Start) -> None:
    server = start("--processes", "2", "--pre-drain", "1", "--drain-deadline", "20")
    before = pids(server)
    load = [Load(server, keep=keep) for keep in (True, False, True)]
    with httpx.stream("GET", server.url + "/ticks?n=80&pace=0.1") as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: 0")
        server.signal(signal.SIGHUP)
        eventually_sync(lambda: not pids(server) & before and len(pids(server)) == 2, 30)
        # The stream of a process that has been replaced goes on to its end.
        assert sum(line.startswith("data: ") for line in lines) == 80
    for thread in load:
        thread.done.set()
        thread.join(10)
        assert thread.failures == []
        assert thread.count > 5
    for pid in before:
        eventually_sync(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 10)
    server.signal(signal.SIGTERM)
    assert server.wait(30) == 0


def test_start_that_cannot_succeed_ends_at_once(start: Start) -> None:
    server = start("--processes", "2", ready=False, redis_url="redis://127.0.0.1:1/0")
    assert server.wait(30) == 1
    assert "Start Redis, or correct REDIS_URL" in server.text()
    assert "Traceback" not in server.text()


def test_processes_do_not_outlive_a_killed_supervisor(start: Start) -> None:
    server = start("--processes", "2", "--pre-drain", "0.1")
    children = pids(server)
    server.signal(signal.SIGKILL)
    server.wait(5)
    for pid in children:
        eventually_sync(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 10)


def test_taken_port_is_one_line(start: Start, valkey: EmbeddedValkey, var_dir: Path) -> None:
    server = start()
    env = {**os.environ, "REDIS_URL": valkey.url, "SLUICE_VAR_DIR": str(var_dir)}
    command = [sys.executable, "manage.py", "serve", "--port", str(server.port)]
    began = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert f"Port {server.port} on 127.0.0.1 is taken" in result.stderr
    assert "--port" in result.stderr
    assert time.monotonic() - began < 20


def children_of(server: ServerProcess) -> set[int]:
    """The server processes that a supervisor has, also those that start or leave."""
    pid = server.process.pid
    found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return {child for child in found if b"--ready-fd" in _command_line(child)}


def _command_line(pid: int) -> bytes:
    """Empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def ready_lines(server: ServerProcess) -> int:
    return server.text().count("is ready")


def test_signal_in_the_middle_of_a_reload_is_heard_at_once(start: Start) -> None:
    """The supervisor was deaf while the second process was being replaced: it waited for that one alone."""
    server = start("--processes", "2", "--pre-drain", "0", "--drain-deadline", "1")
    before = children_of(server)
    server.signal(signal.SIGHUP)
    first = eventually_sync(lambda: children_of(server) - before, 20, every=0.005)
    second = eventually_sync(lambda: children_of(server) - before - first, 40, every=0.005).pop()
    os.kill(second, signal.SIGSTOP)  # it will not be ready so soon
    try:
        server.signal(signal.SIGTERM)
        eventually_sync(lambda: server.text().count("drained in") >= 3, 6)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have died of the signal even so
            os.kill(second, signal.SIGCONT)
    assert server.wait(20) == 0


def test_reload_that_is_asked_for_during_a_reload_follows_it(start: Start) -> None:
    """Before, it was forgotten, and part of the processes ran what was on the disk before it."""
    server = start("--processes", "2", "--pre-drain", "0", "--drain-deadline", "1")
    before = children_of(server)
    server.signal(signal.SIGHUP)
    first = eventually_sync(lambda: children_of(server) - before, 20, every=0.005)
    assert len(first) == 1
    server.signal(signal.SIGHUP)
    server.signal(signal.SIGHUP)
    eventually_sync(lambda: ready_lines(server) == 6, 60)
    eventually_sync(lambda: len(children_of(server)) == 2, 20)
    assert server.text().count("reloading 2 processes") == 2
    server.signal(signal.SIGTERM)
    assert server.wait(30) == 0


def test_reload_while_a_crashed_process_is_being_replaced(start: Start) -> None:
    """The older of the two that were starting won, and had the successor killed."""
    server = start("--processes", "2", "--pre-drain", "0", "--drain-deadline", "1")
    before = children_of(server)
    os.kill(min(before), signal.SIGKILL)
    eventually_sync(lambda: len(children_of(server) - before) == 1, 20, every=0.005)
    replacement = (children_of(server) - before).pop()
    server.signal(signal.SIGHUP)
    eventually_sync(lambda: children_of(server) - before - {replacement}, 10, every=0.005)
    successor = (children_of(server) - before - {replacement}).pop()
    eventually_sync(lambda: len(now := children_of(server)) == 2 and not now & before, 60)
    assert successor in children_of(server)
    assert replacement not in children_of(server)
    server.signal(signal.SIGTERM)
    assert server.wait(30) == 0


def test_successors_that_die_while_their_predecessors_drain_are_replaced(start: Start) -> None:
    """Before, a process that was leaving counted as the one of its slot, which stayed empty after it."""
    server = start("--processes", "2", "--pre-drain", "0", "--drain-deadline", "60")
    before = children_of(server)
    streams = [server.request(b"GET /ticks?n=2000&pace=0.05 HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(12)]
    for sock in streams:
        assert sock.recv(1)
    server.signal(signal.SIGHUP)
    eventually_sync(lambda: ready_lines(server) == 4, 60)
    assert children_of(server) & before, "none of those that serve the streams is left"
    for successor in children_of(server) - before:
        os.kill(successor, signal.SIGKILL)
    eventually_sync(lambda: ready_lines(server) == 6, 60)
    for sock in streams:
        sock.close()
    eventually_sync(lambda: len(now := children_of(server)) == 2 and not now & before, 20)
    server.signal(signal.SIGTERM)
    assert server.wait(30) == 0


def test_told_to_stop_just_as_a_successor_is_ready(start: Start) -> None:
    """The supervisor hears of both at once, of the signal first: its processes hear of a reload that is off."""
    server = start("--processes", "2", "--pre-drain", "0", "--drain-deadline", "20")
    before = children_of(server)
    server.signal(signal.SIGHUP)
    successor = eventually_sync(lambda: children_of(server) - before, 20, every=0.005).pop()
    server.signal(signal.SIGSTOP)
    # Who serves has written to the pipe that says so, which now waits to be read.
    eventually_sync(lambda: successor in pids(server, 10), 40)
    streams = [server.request(b"GET /ticks?n=40&pace=0.05 HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(12)]
    for sock in streams:
        assert sock.recv(1)
    server.signal(signal.SIGTERM)
    server.signal(signal.SIGCONT)
    for sock in streams:
        answer = b"".join(iter(lambda sock=sock: sock.recv(65536), b""))
        assert b"[DONE]" in answer
    assert server.wait(20) == 0
    assert server.text().count("drained in") == 3
    assert "not waiting" not in server.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_its_processes_start(start: Start, number: int) -> None:
    """Before, it exited with 1; a Ctrl-C reached none of them, and was waited for until they were killed."""
    server = start("--processes", "2", ready=False)
    eventually_sync(lambda: len(children_of(server)) == 2, 20, every=0.005)
    server.signal(number)
    assert server.wait(20) == 0
