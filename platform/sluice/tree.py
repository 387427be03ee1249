"""The process tree behind ``manage.py up``: Valkey, worker pool and server as children of one process.

Stopping goes in the order in which work flows, so that nothing loses what it
still needs: the server first (it ends its streams and settles its requests),
then the pool, then Valkey.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from inference.children import spawn
from inference.embedded import EmbeddedValkey

POLL = 0.1
#: Seconds that what runs may go on after a Ctrl-C, until a second signal tells a child to skip all waiting.
PATIENCE = 2.0
ROOT = Path(__file__).resolve().parent.parent.parent


class StopRequested(Exception):
    """Somebody asked for a stop (Ctrl-C or SIGTERM) while things were being started."""


class ChildEnded(Exception):
    """A child ended that should still run; the message says which, and how."""


class Signals:
    """Counts SIGINT and SIGTERM instead of being interrupted by them."""

    def __init__(self) -> None:
        self.count = 0
        self.hurried_at: float | None = None
        self.patience = PATIENCE
        self._wake = -1

    @property
    def hurry(self) -> bool:
        return self.hurried_at is not None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        # Without a handler of its own the end of a child would not reach the pipe that wait() listens on.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._wake, waker = os.pipe()
        for fd in (self._wake, waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes or a child ends, ``seconds`` at most."""
        if select.select([self._wake], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.hurry:
            self.patience = 0.0  # a second Ctrl-C
        elif number == signal.SIGINT or self.count > 1:
            self.hurry_up()

    def hurry_up(self) -> None:
        """From now on stop within seconds: after a Ctrl-C, a second signal, or a fault."""
        if self.hurried_at is None:
            self.hurried_at = time.monotonic()


class Child:
    """One child process, a ``manage.py`` command.

    Args:
        title: how messages name it.
        grace: seconds it may take to end after SIGTERM.
        hurried: seconds after a Ctrl-C at which it is killed if it still runs;
            counted from the Ctrl-C, so that what stops early leaves its time
            to those that stop after it.
    """

    def __init__(self, title: str, *, grace: float, hurried: float) -> None:
        self.title = title
        self.grace = grace
        self.hurried = hurried
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str, env: Mapping[str, str]) -> None:
        command = [sys.executable, str(ROOT / "manage.py"), *arguments]
        self.process = spawn(command, env={**os.environ, **env})

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def how_it_ended(self) -> str:
        code = None if self.process is None else self.process.poll()
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def stop(self, signals: Signals) -> bool:
        """Stop it and everything it started; ``False`` where that took a SIGKILL."""
        if self.process is None:
            return True
        clean = True
        if self.running():
            clean = self._ask(signals)
        self._kill_group()
        self.process.wait()
        return clean

    def _ask(self, signals: Signals) -> bool:
        started = time.monotonic()
        urged = False
        self._send(signal.SIGINT if signals.hurry else signal.SIGTERM)
        while self.running():
            now = time.monotonic()
            if signals.hurried_at is None:
                if now - started > self.grace:
                    return False
            else:
                if not urged and now - max(started, signals.hurried_at) > signals.patience:
                    urged = True
                    self._send(signal.SIGTERM)
                if now - signals.hurried_at > self.hurried and urged:
                    return False
            signals.wait(POLL)
        return True

    def _send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def _kill_group(self) -> None:
        """What it started and left behind is in its session still."""
        assert self.process is not None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


class ProcessTree:
    """Valkey (unless one is given), pool and server, and the order in which they stop."""

    def __init__(self, signals: Signals, *, server: Child, pool: Child) -> None:
        self.signals = signals
        self.server = server
        self.pool = pool
        self.valkey: EmbeddedValkey | None = None

    def start_valkey(self) -> str:
        """Start the embedded Valkey; returns its URL.

        Raises:
            ConfigError: it cannot be started.
        """
        self.valkey = EmbeddedValkey()
        return self.valkey.start()

    def check(self) -> None:
        """Notice what happened since the last call.

        Raises:
            StopRequested: a signal came.
            ChildEnded: a child is gone.
        """
        if self.signals.count:
            raise StopRequested
        for child in (self.server, self.pool):
            if child.process is not None and not child.running():
                raise ChildEnded(f"the {child.title} {child.how_it_ended()}")
        if self.valkey is not None and self.valkey.exit_code() is not None:
            raise ChildEnded("the embedded Valkey server is gone")

    def stop(self) -> list[str]:
        """Stop all, in order; returns the titles of those that had to be killed."""
        killed = [child.title for child in (self.server, self.pool) if not child.stop(self.signals)]
        if self.valkey is not None:
            self.valkey.stop()
        return killed
