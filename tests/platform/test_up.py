"""``manage.py up``: one process tree from nothing to ready, and back to nothing.

The real command, in a folder, a database and a temporary directory of the test's own.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.support import eventually_sync

READY = "Ctrl-C stops everything."
STOP_LIMIT = 10.0  # seconds, the documented bound after a Ctrl-C

pytestmark = pytest.mark.faults


class Up:
    """One run of the command; collects its output and every process it ever had."""

    def __init__(self, folder: Path, port: int, **env: str) -> None:
        self.port = port
        self.tmp = folder / "t"
        self.tmp.mkdir(exist_ok=True)
        self.log = folder / "up.log"
        settings = {
            "SLUICE_VAR_DIR": str(folder / "var"),
            "SLUICE_MODELS": "s=scripted:rate=50",
            "SLUICE_DEVICES": "cpu",
            "SLUICE_PRE_DRAIN": "0.2",
            "SLUICE_DRAIN_DEADLINE": "2",
            "SLUICE_DRAIN_TIMEOUT": "2",
            "TMPDIR": str(self.tmp),
            "PYTHONUNBUFFERED": "1",
        }
        clean = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "DATABASE_URL")}
        self.offset = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up", "--port", str(port)],
                cwd=ROOT,
                env={**clean, **settings, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_bytes()[self.offset :].decode(errors="replace")

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.output()
            return READY in self.output()

        eventually_sync(ready, 60, what="ready")

    def wait_end(self, timeout: float = 30) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output()}") from None

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, pattern: str) -> psutil.Process:
        """The one whose command line matches."""
        for process in self.family():
            if re.search(pattern, " ".join(process.cmdline()).strip()):
                return process
        raise AssertionError(f"no {pattern} among the children")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="up-", dir="/tmp") as name:  # short: sockets live in it
        yield Path(name)


@pytest.fixture
def up(folder, free_port) -> Iterator[object]:
    runs: list[Up] = []

    def start(**env: str) -> Up:
        runs.append(Up(folder, free_port, **env))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            family = run.family()
            run.process.kill()
            run.process.wait()
            for process in family:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_from_nothing_to_ready_and_back_to_nothing(up):
    run = up()
    run.wait_ready()
    with urllib.request.urlopen(f"http://127.0.0.1:{run.port}/readyz", timeout=5) as reply:
        assert reply.status == 200
    listens, ready = (run.output().index(f"{word} http://127.0.0.1:{run.port}/") for word in ("Listening on", "s: "))
    assert listens < ready, "a server that listens has no worker yet"
    assert re.search(r"sign in as +admin\n +password +\S+\n +API key +sk-", run.output())
    family = run.family()
    assert len(family) >= 4  # Valkey, pool, worker, server
    asked = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait_end() == 0
    assert time.monotonic() - asked < STOP_LIMIT
    assert gone(family)
    assert list(run.tmp.iterdir()) == []
    assert "nothing is left running" in run.output()

    again = up()
    again.wait_ready()
    assert "Sign in as before" in again.output()
    assert "password  " not in again.output()
    again.process.send_signal(signal.SIGTERM)
    assert again.wait_end() == 0
    assert list(again.tmp.iterdir()) == []


def test_name_and_password_of_the_first_user_can_be_chosen(up):
    run = up(SLUICE_ADMIN_USER="root-user", SLUICE_ADMIN_PASSWORD="chosen-by-me-42", SLUICE_ADMIN_MAIL="me@here")
    run.wait_ready()
    assert "sign in as   root-user" in run.output()
    assert "chosen-by-me-42" not in run.output()
    said = run.output().count("Warning: SLUICE_ADMIN_MAIL is no setting")
    assert said == 1, "the server and the pool need not repeat it"


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"manage\.py serve$", "the server was killed by SIGKILL"),
        (r"manage\.py runworker$", "the worker pool was killed by SIGKILL"),
        ("valkey-server", "the embedded Valkey server is gone"),
    ],
)
def test_a_child_that_dies_takes_the_tree_down_and_is_named(up, pattern, said):
    run = up()
    run.wait_ready()
    family = run.family()
    run.child(pattern).kill()
    assert run.wait_end() == 1
    assert f"error: {said}" in run.output()
    eventually_sync(lambda: gone(family), 10, what="all children gone")
    assert list(run.tmp.iterdir()) == []


def test_an_own_redis_is_used_and_left_clean(up, redis_url):
    run = up(REDIS_URL=redis_url)
    run.wait_ready()
    assert "Valkey: starting" not in run.output()
    assert not [p for p in run.family() if "valkey-server" in p.name()]
    stream = open_stream(run, tokens=4000)
    stream.read(20)
    run.process.send_signal(signal.SIGINT)
    assert run.wait_end() == 0
    stream.close()
    audit = subprocess.run(
        [sys.executable, "manage.py", "inflight", "--audit"],
        cwd=ROOT,
        env={**os.environ, "REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr


def open_stream(run: Up, tokens: int) -> http.client.HTTPResponse:
    """An open SSE answer of so many tokens (50 a second)."""
    key = re.search(r"API key +(sk-\S+)", run.output())[1]
    request = urllib.request.Request(
        f"http://127.0.0.1:{run.port}/v1/completions",
        json.dumps({"model": "s", "prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=30)


def test_sigterm_lets_a_running_stream_finish(up):
    run = up(SLUICE_DRAIN_DEADLINE="20")
    run.wait_ready()
    with open_stream(run, tokens=40) as stream:
        stream.read(20)
        run.process.send_signal(signal.SIGTERM)
        body = stream.read().decode()
    assert body.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in body.replace(" ", "")
    assert run.wait_end() == 0


def test_ctrl_c_ends_a_running_stream_and_all_the_rest(up):
    run = up(SLUICE_DRAIN_DEADLINE="60")
    run.wait_ready()
    family = run.family()
    with open_stream(run, tokens=4000) as stream:
        stream.read(20)
        asked = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert "error" in stream.read().decode()
    assert run.wait_end() == 0
    assert "what still runs has 2 s" in run.output() and "again:" not in run.output(), "Ctrl-C was pressed once"
    assert time.monotonic() - asked < STOP_LIMIT
    assert gone(family)
    assert list(run.tmp.iterdir()) == []


def test_nothing_outlives_a_killed_tree(up):
    run = up()
    run.wait_ready()
    family = run.family()
    run.process.kill()
    run.process.wait()
    eventually_sync(lambda: gone(family), 60, what="all children gone")
    # Nor does anything stand in the way of the next: port, database, sockets, folders.
    again = up()
    again.wait_ready()
    again.process.send_signal(signal.SIGINT)
    assert again.wait_end() == 0
    assert list(again.tmp.iterdir()) == []


def test_ctrl_c_while_starting(up):
    run = up()
    eventually_sync(lambda: "Workers and server: starting" in run.output(), 30, what="starting")
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.wait_end(STOP_LIMIT) == 0
    assert gone(family)
    assert list(run.tmp.iterdir()) == []


@pytest.mark.model
def test_ctrl_c_while_the_model_loads(up, model_folder):
    """A worker that loads answers no signal; the pool used to wait for it until it was killed itself."""
    run = up(SLUICE_MODELS="m=default")
    eventually_sync(lambda: "listens, but is not ready: no worker serves m" in run.output(), 60, what="loading")
    family = run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.wait_end(STOP_LIMIT) == 0, run.output()
    assert gone(family)


def last_line(run: Up) -> str:
    assert run.wait_end() == 1
    return run.output().strip().splitlines()[-1]


def test_a_taken_port_is_said_before_anything_is_started(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = Up(folder, taken.getsockname()[1])
        assert re.search(r"port \d+ on 127\.0\.0\.1 is taken; .* --port", last_line(run))
    assert "Database" not in run.output()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"REDIS_URL": "redis://127.0.0.1:1"}, "error: the Redis in REDIS_URL does not answer"),
        ({"REDIS_URL": "http://127.0.0.1"}, "error: REDIS_URL must start with redis://"),
        ({"DATABASE_URL": "postgres://u:p@127.0.0.1:1/d"}, "error: the database does not answer"),
        ({"DATABASE_URL": "nonsense"}, "error: DATABASE_URL is malformed"),
        ({"SLUICE_HEARTBEAT_TTL": "soon"}, "error: SLUICE_HEARTBEAT_TTL must be a number"),
        ({"SLUICE_DEVICES": "gpu7"}, "error: SLUICE_DEVICES (--devices): 'gpu7' is none of auto, cpu"),
        (
            {"SLUICE_DEVICES": "cpu,cuda:7", "CUDA_VISIBLE_DEVICES": "0", "SLUICE_MODELS": "m=default"},
            "error: SLUICE_DEVICES (--devices): there is no cuda:7 here; CUDA_VISIBLE_DEVICES shows 1 CUDA device",
        ),
        ({"SLUICE_HOST": "203.0.113.7"}, "error: cannot listen on 203.0.113.7"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(up, env, said):
    run = up(**env)
    line = last_line(run)
    assert line.startswith(said)
    assert "Traceback" not in run.output()
    assert "p@127" not in run.output()
    assert list(run.tmp.iterdir()) == []


def test_a_model_that_cannot_be_fetched(up, folder):
    run = up(SLUICE_MODELS="m=default", SLUICE_CACHE_DIR=str(folder / "cache"), PIP_NO_INDEX="1")
    assert "the default model could not be fetched" in last_line(run)
    assert "check the network" in run.output()
    assert [p.name for p in (folder / "cache" / "models").iterdir()] == [".lock"]
    assert "Traceback" not in run.output()


@pytest.mark.parametrize("event", ["subprocess.Popen(['true'])", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_the_end_of_a_child_and_a_signal_cut_the_wait_short(event):
    """While nothing happens it sleeps instead of looking all the time; without the pipe it would sleep for a minute."""
    script = (
        "import os, signal, subprocess\nfrom sluice.tree import Signals\n"
        f"signals = Signals()\nsignals.install()\nchild = {event}\nsignals.wait(60)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "platform")])
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=30)
