"""``manage.py serve --processes N``: a supervisor and N server processes on one listening socket.

The supervisor binds the socket and serves nothing itself, so that nothing can
stop it from minding the others. A process that dies is replaced, with backoff.
SIGHUP replaces them all, one after the other and without a failed request: each
successor is ready before its predecessor stops accepting and drains. SIGTERM and
SIGINT go to all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from inference import multiproc
from inference.children import spawn
from sluice.conf import ServerConfig

logger = logging.getLogger("sluice.supervisor")

POLL = 1.0
FIRST_BACKOFF = 0.5
LAST_BACKOFF = 10.0
#: A process that has lived so long starts over with the first backoff.
STABLE_AFTER = 60.0
#: Time to become ready, seconds.
START_SECONDS = 60.0
MANAGE = Path(__file__).resolve().parents[3] / "manage.py"


class Child:
    """One server process of one slot."""

    def __init__(self, slot: int, process: subprocess.Popen[bytes], ready_fd: int) -> None:
        self.slot = slot
        self.process = process
        self.ready_fd = ready_fd
        self.started = time.monotonic()
        self.ready = False
        self.leaving = False

    def forget_pipe(self) -> None:
        if self.ready_fd >= 0:
            os.close(self.ready_fd)
            self.ready_fd = -1


class Supervisor:
    """Keeps N server processes; see the module's text."""

    def __init__(self, config: ServerConfig, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        self.config = config
        self.listener = listener
        self.on_ready = on_ready
        self.children: list[Child] = []
        self.exit_code = 0
        self._announced = False
        self._stopping = False
        self._kill_at = float("inf")
        self._signals: deque[int] = deque()
        self._reload: deque[int] = deque()
        self._reload_again = False
        self._backoff = [FIRST_BACKOFF] * config.processes
        self._restart_at: dict[int, float] = {}
        self._metrics_dir = ""

    def run(self) -> int:
        """Supervise until told to stop; returns the exit code."""
        wake, waker = os.pipe()
        for fd in (wake, waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda n, frame: self._signals.append(n))
        with contextlib.ExitStack() as stack:
            stack.callback(signal.set_wakeup_fd, -1)
            # Each process counts into files of its own here; whichever is scraped adds them up.
            self._metrics_dir = stack.enter_context(multiproc.folder())
            for slot in range(self.config.processes):
                self._start(slot)
            while self.children or (self._restart_at and not self._stopping):
                pipes = [c.ready_fd for c in self.children if c.ready_fd >= 0]
                readable, _, _ = select.select([wake, *pipes], [], [], self._sleep())
                if wake in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                self._take_signals()
                self._take_ready(readable)
                self._reap()
                self._start_due()
                self._mind_time()
        return self.exit_code

    # --- processes --------------------------------------------------------------------

    def _start(self, slot: int) -> None:
        ready, told = os.pipe()
        fd = self.listener.fileno()
        command = [sys.executable, str(MANAGE), "serve", "--fd", str(fd), "--ready-fd", str(told)]
        env = {**os.environ, **self.config.to_env(), multiproc.VARIABLE: self._metrics_dir}
        try:
            process = spawn(command, env=env, pass_fds=(fd, told))
        finally:
            os.close(told)
        self.children.append(Child(slot, process, ready))

    def _take_ready(self, readable: list[int]) -> None:
        # Of a copy: the next one that is started gets the number of the pipe that was closed for this one.
        for child in list(self.children):
            if child.ready_fd in readable:
                child.ready = bool(os.read(child.ready_fd, 1))
                child.forget_pipe()
                if child.ready:
                    self._became_ready(child)
        if not self._announced and len({c.slot for c in self.children if c.ready}) == self.config.processes:
            self._announced = True
            self.on_ready()

    def _became_ready(self, child: Child) -> None:
        logger.info("server process %d is ready", child.process.pid, extra={"event": "process_ready"})
        siblings = [c for c in self.children if c.slot == child.slot and c is not child]
        for old in siblings:
            if old.started < child.started and not old.leaving:
                old.leaving = True
                old.process.send_signal(signal.SIGHUP)
        if self._reload and self._reload[0] == child.slot and all(c.leaving for c in siblings):
            self._reload.popleft()
            self._reload_next()

    def _reap(self) -> None:
        for child in list(self.children):
            code = child.process.poll()
            if code is None:
                continue
            self.children.remove(child)
            child.forget_pipe()
            if self._stopping or child.leaving:
                # One that was still starting, or past its loop already, dies of our signal: it has nothing to finish.
                if code not in (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
                    self.exit_code = 1
                continue
            if not self._announced:
                # It cannot start at all, and has said why.
                self.exit_code = self.exit_code or (code if code > 0 else 1)
                self._stop(signal.SIGTERM)
                continue
            logger.error("server process %d ended with %d", child.process.pid, code, extra={"event": "process_died"})
            if self._reload and self._reload[0] == child.slot and not child.ready:
                logger.error("reload given up: the new process did not start", extra={"event": "reload_failed"})
                self._reload.clear()
                self._reload_next()
            # One that is leaving serves nobody new, and is followed by nobody.
            if not any(c.slot == child.slot and not c.leaving for c in self.children):
                self._restart_later(child)

    def _restart_later(self, child: Child) -> None:
        now = time.monotonic()
        if now - child.started > STABLE_AFTER:
            self._backoff[child.slot] = FIRST_BACKOFF
        self._restart_at[child.slot] = now + self._backoff[child.slot]
        self._backoff[child.slot] = min(LAST_BACKOFF, self._backoff[child.slot] * 2)

    def _start_due(self) -> None:
        if self._stopping:
            self._restart_at.clear()
        for slot, due in list(self._restart_at.items()):
            if time.monotonic() >= due:
                del self._restart_at[slot]
                self._start(slot)

    def _mind_time(self) -> None:
        now = time.monotonic()
        for child in self.children:
            if not child.ready and not child.leaving and now - child.started > START_SECONDS:
                logger.error("server process %d did not become ready; killing it", child.process.pid)
                child.process.kill()
        if now > self._kill_at:
            for child in self.children:
                child.process.kill()

    def _sleep(self) -> float:
        due = min(self._restart_at.values(), default=float("inf"))
        return max(0.0, min(POLL, due - time.monotonic()))

    # --- signals ----------------------------------------------------------------------

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(number)
            elif number == signal.SIGHUP and not self._stopping:
                # Where one is under way, once more after it: what is on the disk may have changed meanwhile.
                self._reload_again = True
                if not self._reload:
                    self._reload_next()

    def _reload_next(self) -> None:
        if not self._reload and self._reload_again:
            self._reload_again = False
            logger.info("reloading %d processes", self.config.processes, extra={"event": "reload"})
            self._reload.extend(range(self.config.processes))
        if self._reload:
            slot = self._reload[0]
            self._restart_at.pop(slot, None)
            self._start(slot)

    def _stop(self, number: int) -> None:
        if not self._stopping:
            self._stopping = True
            self._kill_at = time.monotonic() + self.config.longest_stop + 2.0
            self._reload_again = False
            self._reload.clear()
        for child in self.children:
            # One that starts heeds no SIGINT until it has chosen what that does.
            child.process.send_signal(number if child.ready else signal.SIGTERM)
