"""Real server processes for the tests of the server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.embedded import EmbeddedValkey
from tests.conftest import ROOT
from tests.support import eventually_sync

START_SECONDS = 60


class ServerProcess:
    """A ``manage.py serve`` of its own."""

    def __init__(self, log: Path, redis_url: str, var: Path, *args: str, **env: str) -> None:
        self.log = log
        self.url = ""
        values = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
            "REDIS_URL": redis_url,
            "SLUICE_MODELS": "scripted=scripted:rate=200",
            "SLUICE_ASGI_APPLICATION": "tests.platform.app.application",
            "SLUICE_VAR_DIR": str(var),
            "SLUICE_DEBUG": "0",
            "SLUICE_METRICS_ACCESS": "public",
            **env,
        }
        self._file = log.open("w")
        self._sockets: list[socket.socket] = []
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--port", "0", *args],
            cwd=ROOT,
            env=values,
            stdout=subprocess.PIPE,
            stderr=self._file,
            text=True,
        )

    def wait_ready(self) -> ServerProcess:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"Listening on (http://([^:]+):(\d+))/", line)
        assert found, f"no address in {line!r}; log:\n{self.text()}"
        self.url, self.host, self.port = found[1], found[2], int(found[3])
        return self

    def text(self) -> str:
        return self.log.read_text()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)

    def state(self) -> dict[str, Any]:
        return httpx.get(self.url + "/state", headers={"connection": "close"}, timeout=20).json()

    def wait_state(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 10) -> dict[str, Any]:
        """The state once ``condition`` holds for it."""

        def check() -> dict[str, Any]:
            state = self.state()
            assert condition(state), f"never: {json.dumps(state, indent=1)}\n{self.text()[-3000:]}"
            return state

        return eventually_sync(check, seconds)

    def connect(self, **options: int) -> socket.socket:
        """A plain TCP connection; ``rcvbuf`` sets the size of its receive buffer."""
        sock = socket.socket()
        self._sockets.append(sock)
        if "rcvbuf" in options:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["rcvbuf"])
        sock.settimeout(20)
        sock.connect((self.host, self.port))
        return sock

    def request(self, raw: bytes, **options: int) -> socket.socket:
        """A connection on which ``raw`` has been sent."""
        sock = self.connect(**options)
        sock.sendall(raw)
        return sock

    def signal(self, number: int) -> float:
        """Send a signal; the time at which it was sent."""
        self.process.send_signal(number)
        return time.monotonic()

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._file.close()


@pytest.fixture(scope="session")
def var_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database that every server of the run shares."""
    folder = tmp_path_factory.mktemp("var")
    env = {**os.environ, "SLUICE_VAR_DIR": str(folder), "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
    subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], cwd=ROOT, env=env, check=True)
    return folder


@pytest.fixture
def start(tmp_path: Path, valkey: EmbeddedValkey, var_dir: Path) -> Iterator[Callable[..., ServerProcess]]:
    """A factory of servers: ``start("--pre-drain", "1", SLUICE_READ_TIMEOUT="1")``."""
    servers: list[ServerProcess] = []

    def make(*args: str, ready: bool = True, redis_url: str = "", **env: str) -> ServerProcess:
        log = tmp_path / f"server{len(servers)}.log"
        server = ServerProcess(log, redis_url or valkey.url, var_dir, *args, **env)
        servers.append(server)
        return server.wait_ready() if ready else server

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, empty_valkey: EmbeddedValkey, var_dir: Path
) -> Iterator[ServerProcess]:
    """One server for the tests of a module that leave it as it was."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    process = ServerProcess(log, empty_valkey.url, var_dir)
    try:
        yield process.wait_ready()
    finally:
        process.close()
