"""One worker process as its supervisor sees it: spawn, listen, kill."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time

from inference.config import Config
from inference.pool.devices import environment

logger = logging.getLogger("sluice.pool")


class Child:
    """A spawned worker. It writes ``.`` with each heartbeat and ``r`` once it is ready.

    The status pipe needs no Redis: a worker that is frozen falls silent here
    even when Redis is what has failed.
    """

    def __init__(
        self, worker_id: str, device: str, config: Config, *, pool: str, models: list[str], restarts: int
    ) -> None:
        self.id = worker_id
        self.device = device
        self.ready = asyncio.Event()
        self.last_beat = time.monotonic()
        self.started = time.monotonic()
        self._config = config
        self._pool = pool
        self._models = models
        self._restarts = restarts
        self._process: asyncio.subprocess.Process | None = None
        self._read_fd = -1

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def spawn(self) -> None:
        """Start the process, in a session of its own: a terminal's Ctrl-C reaches only the supervisor."""
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        device_env = environment(self.device)
        env = {**os.environ, **device_env, "PYTHONUNBUFFERED": "1"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "inference.worker",
                "--id", self.id, "--pool", self._pool, "--device", device_env["SLUICE_WORKER_DEVICE"],
                "--models", ",".join(self._models), "--parent", str(os.getpid()), "--status-fd", str(write_fd),
                "--restarts", str(self._restarts), "--drain-timeout", str(self._config.drain_timeout),
                env=env, pass_fds=[write_fd], start_new_session=True, stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(write_fd)
        asyncio.get_running_loop().add_reader(self._read_fd, self._heard)

    def _heard(self) -> None:
        try:
            data = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        if not data:
            self._close()
            return
        self.last_beat = time.monotonic()
        if b"r" in data:
            self.ready.set()

    def _close(self) -> None:
        if self._read_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1

    async def wait(self) -> int:
        """Exit status (negative: the signal)."""
        assert self._process is not None
        status = await self._process.wait()
        self._close()
        return status

    def silent_for(self) -> float:
        """Seconds since its last sign of life."""
        return time.monotonic() - self.last_beat

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
