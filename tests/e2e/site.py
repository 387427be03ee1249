"""A whole installation of its own: Valkey, database, one server, one pool of scripted workers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import redis

from inference.embedded import find_binary
from inference.keys import Keys
from inference.messages import WorkerBeat, decode_worker_beat
from tests.conftest import ROOT
from tests.support import eventually_sync, find_free_port

MODEL = "scripted"
PASSWORD = "correct horse battery"
START_SECONDS = 60


class Site:
    """Processes and what is asked of them. ``target`` are the scripted engine's options."""

    def __init__(
        self,
        folder: Path,
        *,
        target: str = "rate=60,say=1,faults=1,context=40000",
        start_seconds: float = START_SECONDS,
        **env: str,
    ) -> None:
        self.folder = folder
        self.start_seconds = start_seconds
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.redis_port = find_free_port()
        self.redis_url = f"redis://127.0.0.1:{self.redis_port}"
        self.valkey: subprocess.Popen[bytes] | None = None
        self.keys = Keys()
        self.env = {
            **{k: v for k, v in os.environ.items() if k != "DATABASE_URL"},
            "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
            "REDIS_URL": self.redis_url,
            "SLUICE_MODELS": f"{MODEL}=scripted:{target}",
            "SLUICE_VAR_DIR": str(folder),
            "SLUICE_DEBUG": "1",
            "SLUICE_PRE_DRAIN": "0.2",
            "SLUICE_DRAIN_DEADLINE": "1",
            "SLUICE_DEVICES": "cpu",
            "SLUICE_HEARTBEAT_INTERVAL": "0.3",
            "SLUICE_HEARTBEAT_TTL": "1.5",
            "DJANGO_SUPERUSER_PASSWORD": PASSWORD,
            **env,
        }
        self.server: subprocess.Popen[bytes] | None = None
        self.second: subprocess.Popen[bytes] | None = None
        self.pool: subprocess.Popen[bytes] | None = None
        self._logs: list[Any] = []
        self._cookies: dict[str, list[Any]] = {}
        self.manage("migrate", "-v0")
        self.add_user("ada")

    def manage(self, *args: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *args], cwd=ROOT, env=self.env, check=True, capture_output=True, text=True
        )
        return done.stdout

    def add_user(self, name: str) -> None:
        self.manage("createsuperuser", "--noinput", "--username", name, "--email", f"{name}@example.org")

    def _spawn(self, name: str, *args: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        return subprocess.Popen(
            [sys.executable, "manage.py", *args], cwd=ROOT, env=self.env, stdout=log, stderr=subprocess.STDOUT
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def start(self, *, pool: bool = True) -> Site:
        self.start_redis()
        self.start_server()
        if pool:
            self.start_pool()
        eventually_sync(self._up, self.start_seconds, what="the site is ready")
        return self

    def _up(self) -> bool:
        for name, process in (("server", self.server), ("pool", self.pool)):
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"the {name} has ended:\n{self.log(name)[-2000:]}")
        return self.status("/readyz") == 200

    def start_redis(self) -> None:
        """Empty, as after a restart without persistence."""
        command = [find_binary(), "--port", str(self.redis_port), "--bind", "127.0.0.1", "--save", "", "--dir"]
        self.valkey = subprocess.Popen([*command, str(self.folder)], stdout=subprocess.DEVNULL)
        eventually_sync(self._answers, 10, what="Valkey answers")

    def _answers(self) -> bool:
        try:
            with self.redis() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def stop_redis(self) -> None:
        if self.valkey is not None:
            self.valkey.kill()
            self.valkey.wait()

    def start_server(self) -> None:
        self.server = self._spawn("server", "serve", "--port", str(self.port))

    def start_second_server(self) -> str:
        """Another server on the same database and Redis; its URL."""
        port = find_free_port()
        self.second = self._spawn("second", "serve", "--port", str(port))
        url = f"http://127.0.0.1:{port}"
        eventually_sync(lambda: self.status("/readyz", url) == 200, self.start_seconds, what="a second server")
        return url

    def start_pool(self) -> None:
        self.pool = self._spawn("pool", "runworker")

    def status(self, path: str, url: str = "") -> int:
        import httpx

        try:
            return httpx.get((url or self.url) + path, timeout=2).status_code
        except httpx.HTTPError:
            return 0

    def close(self) -> None:
        for process in (self.server, self.second, self.pool):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.stop_redis()
        for log in self._logs:
            log.close()

    # --- what Redis and the workers say -------------------------------------------------------

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.redis_url)

    def live(self) -> int:
        """Requests that have not ended."""
        with self.redis() as client:
            return int(client.zcard(self.keys.live))

    def workers(self) -> list[WorkerBeat]:
        with self.redis() as client:
            names = [name.decode() for name in client.smembers(self.keys.workers)]
            beats = [client.get(self.keys.worker_beat(name)) for name in names]
        return [decode_worker_beat(beat) for beat in beats if beat]

    def running(self) -> int:
        return sum(beat.stats.running for beat in self.workers())

    def wait_quiet(self, seconds: float = 2.0) -> None:
        """QUIET(n s): no live request, and the workers run no sequence."""
        eventually_sync(lambda: self.live() == 0, seconds, what="no live request")
        # The heartbeat tells with its own delay.
        eventually_sync(lambda: self.running() == 0, 1.0, what="no running sequence")

    def outcomes(self) -> dict[str, int]:
        with self.redis() as client:
            return {k.decode(): int(v) for k, v in client.hgetall(self.keys.outcomes).items()}

    def forget_cookies(self, user: str) -> list[Any]:
        """Those of a session that a test ends; the next :meth:`cookies` sign in anew."""
        return self._cookies.pop(user)

    def cookies(self, user: str = "ada") -> list[Any]:
        """Session cookies of a signed-in user, for a browser context."""
        import httpx

        if user not in self._cookies:
            with httpx.Client(base_url=self.url, follow_redirects=True, timeout=20) as client:
                page = client.get("/")
                token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
                assert token, page.text[:500]
                form = {"username": user, "password": PASSWORD, "csrfmiddlewaretoken": token[1]}
                done = client.post(page.url, data=form, headers={"referer": str(page.url)})
                assert done.status_code == 200, done.text[:500]
                self._cookies[user] = [
                    {"name": cookie.name, "value": cookie.value, "url": self.url} for cookie in client.cookies.jar
                ]
        return self._cookies[user]


class Cut:
    """A TCP proxy in front of a site: the network that a test can take away."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.up = True
        self._start(self._accept)

    def _start(self, function: Any, *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self.up:
                client.close()
                continue
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as upstream:
            self._open |= {client, upstream}
            back = threading.Thread(target=_pump, args=(upstream, client), daemon=True)
            back.start()
            _pump(client, upstream)
            back.join()
            self._open -= {client, upstream}

    def down(self) -> None:
        """Break every connection and refuse new ones."""
        self.up = False
        for each in list(self._open):
            _end(each)

    def close(self) -> None:
        self.down()
        _end(self._listener)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    _end(source)
    _end(sink)


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
