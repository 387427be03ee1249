"""The drain: how a server process leaves without failing a request.

::

    serving -> pausing -> refusing -> finishing -> ending -> exit 0

*Pausing*: readiness is false, everything is still served, so that load balancers
look away first. *Refusing*: new inference gets 503, idle connections are closed.
*Finishing*: what runs goes on, up to the deadline. *Ending*: resumable requests are
detached, the others are ended and settled. A second SIGTERM skips the waiting, SIGINT
skips the pause. An operator may ask for a drain without a signal: it goes as far as
*finishing*, does not exit, and can be undone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable
from typing import Any

from inference.errors import SluiceError
from sluice.conf import ENDING_SECONDS, ServerConfig
from sluice.consumers.live import live_consumers
from sluice.exchanges import ExchangeRegistry
from sluice.status import ServerState, ServerStatus

logger = logging.getLogger("sluice.drain")

LOG_EVERY = 5.0
#: How long a log line waits for what Redis knows of it.
DESCRIBE_SECONDS = 1.0
WARN_AFTER = 30.0
#: Of the time for ending, what the process itself needs to leave.
LEAVE_SECONDS = 1.0
#: Ids named in one log line.
MAX_IDS = 50


class DrainHooks:
    """What the drain needs of the rest of the process; all optional."""

    def state_changed(self, state: ServerState) -> None:
        """Told at each step."""

    async def describe(self) -> str:
        """Requests and workers, for the log line."""
        return ""

    def open_ids(self) -> list[str]:
        """Ids of the requests being streamed."""
        return []

    async def end_streams(self) -> None:
        """Detach resumable requests, end the others."""

    async def stop(self, timeout: float) -> None:
        """Wait for the settler and let go of Redis."""


class Drain:
    """Runs at most one drain at a time, on the server's event loop.

    Args:
        owns_process: end the process in time, whatever is stuck in it.
    """

    def __init__(
        self,
        config: ServerConfig,
        status: ServerStatus,
        exchanges: ExchangeRegistry,
        hooks: DrainHooks,
        *,
        owns_process: bool = False,
    ) -> None:
        self.config = config
        self.status = status
        self.exchanges = exchanges
        self.hooks = hooks
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._watched = owns_process
        self._exiting = False
        self._replaced = False
        self._skip_pause = asyncio.Event()
        self._skip_wait = asyncio.Event()
        self._began = 0.0
        self._first = ""
        """The signal that began the drain."""

    def attach(self, server: Any) -> None:
        self._server = server

    @property
    def started(self) -> bool:
        return self._exiting

    # --- who asks ---------------------------------------------------------------------

    def on_sigterm(self) -> None:
        """Drain and exit; asked again, do not wait any longer."""
        self._signalled("SIGTERM", skip_pause=False)

    def on_sigint(self) -> None:
        """As SIGTERM, without the pause: somebody at a terminal waits."""
        self._signalled("SIGINT", skip_pause=True)

    def on_sighup(self) -> None:
        """A successor serves: take no new connections, and drain as for SIGTERM."""
        if self._server is not None:
            self._server.stop_listening()
        if not self._exiting:
            self._replaced = True
        self._signalled("SIGHUP", skip_pause=False)

    def _signalled(self, name: str, *, skip_pause: bool) -> None:
        if skip_pause:
            self._skip_pause.set()
        if self._exiting:
            if name == "SIGHUP":
                return
            if self._replaced:
                # The first signal after a reload: it meant all processes, not "hurry".
                self._replaced = False
                return
            if self.status.state is ServerState.ENDING:
                return  # nothing is waited for any more
            if name == "SIGTERM" or self.status.refusing:
                again = " again" if name == self._first else ""
                logger.warning("%s%s: not waiting any longer", name, again, extra={"event": "drain_skip"})
                self._skip_pause.set()
                self._skip_wait.set()
            return
        logger.info("%s: draining", name, extra={"event": "drain_signal"})
        self._exiting = True
        self._first = name
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_event_loop().create_task(self._exit(), name="drain")
        self._task.add_done_callback(self._exited)

    def on_command(self, verb: str) -> None:
        """An operator's ``drain`` or ``undrain``. Neither has a say once the process is leaving."""
        if self._exiting:
            return
        if verb == "drain" and self._task is None:
            logger.info("an operator asked for a drain", extra={"event": "drain_command"})
            self._task = asyncio.get_running_loop().create_task(self._step_aside(), name="drain")
        elif verb == "undrain" and self._task is not None:
            self._task.cancel()
            self._task = None
            self.status.deadline = None
            self._move(ServerState.SERVING, undo=True)
            logger.info("the drain is undone; serving again", extra={"event": "drain_undone"})

    # --- the two kinds ----------------------------------------------------------------

    async def _step_aside(self) -> None:
        """Stop taking work until undone or ended by a signal; what runs may take as long as it likes."""
        self._began = time.monotonic()
        await self._pause()
        self._refuse()
        self._move(ServerState.FINISHING)
        await self._finish(None)
        logger.info("drained; waiting for a signal, or for undrain", extra={"event": "drained"})

    async def _exit(self) -> None:
        config = self.config
        self._began = time.monotonic()
        paused_already = self.status.refusing
        wait = (0.0 if paused_already else config.pre_drain) + config.drain_deadline
        self.status.deadline = self._began + wait + ENDING_SECONDS
        dog = _Watchdog(wait + ENDING_SECONDS) if self._watched else None
        if self._server is None or not self._server.accepting:
            # Nothing has been served yet: there is nobody to wait for.
            if self._server is not None:
                self._server.cancel_start()
        else:
            if not paused_already:
                await self._pause()
                self._refuse()
            # A skipped pause is not added to the time that streams have.
            self._move(ServerState.FINISHING)
            self.status.deadline = time.monotonic() + config.drain_deadline + ENDING_SECONDS
            await self._finish(config.drain_deadline)
        self._move(ServerState.ENDING)
        await self._end()
        if dog is not None:
            dog.drained.set()
        logger.info("drained in %.1f s", time.monotonic() - self._began, extra={"event": "drain_done"})
        if self._server is not None:
            self._server.stop()

    def _exited(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            logger.critical("the drain failed; leaving at once", exc_info=exc)
            if self._server is not None:
                self._server.exit_code = 1
                self._server.stop()

    # --- the steps --------------------------------------------------------------------

    def _move(self, state: ServerState, *, undo: bool = False) -> None:
        self.status.move(state, undo=undo)
        self.hooks.state_changed(state)
        logger.info("server is %s", state, extra={"event": "server_state"})

    async def _pause(self) -> None:
        self._move(ServerState.PAUSING)
        ends = time.monotonic() + self.config.pre_drain
        while (left := ends - time.monotonic()) > LOG_EVERY:
            await self._wait(self._skip_pause.wait(), LOG_EVERY)
            if self._skip_pause.is_set():
                return
            self._report_open()
        await self._wait(self._skip_pause.wait(), left)

    def _refuse(self) -> None:
        self._move(ServerState.REFUSING)
        if self._server is not None:
            self._server.close_idle()
        for consumer in live_consumers():
            if not getattr(consumer, "drain_waits", True) or getattr(consumer, "idle", False):
                task = asyncio.get_running_loop().create_task(consumer.shut_down())
                task.add_done_callback(_report)

    async def _finish(self, seconds: float | None) -> None:
        """Wait until no exchange is open, at most so long; say every few seconds what it waits for."""
        began = time.monotonic()
        done = asyncio.ensure_future(self.exchanges.wait_empty())
        skip = asyncio.ensure_future(self._skip_wait.wait())
        try:
            while not done.done() and not skip.done():
                left = LOG_EVERY if seconds is None else seconds - (time.monotonic() - began)
                if left <= 0:
                    break
                self._report_open()
                await asyncio.wait({done, skip}, timeout=min(LOG_EVERY, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
            skip.cancel()

    async def _end(self) -> None:
        """End everything that is left, in a fixed time."""
        hooks = self.hooks
        ends = time.monotonic() + ENDING_SECONDS - LEAVE_SECONDS
        self._report_open()
        await self._wait(hooks.end_streams(), 0.3)
        # Their handlers now write the last event and leave.
        await self._wait(self.exchanges.wait_empty(), 0.8)
        left = [consumer.shut_down() for consumer in live_consumers()]
        if left:
            logger.warning("ending %d exchanges at the deadline", len(left), extra={"event": "drain_cut"})
            await self._wait(asyncio.gather(*left, return_exceptions=True), 0.8)
        if self._server is not None:
            self._server.close_idle()
            await self._wait(self._server.wait_closed(), 0.4)
            # Those who do not read have no say in when we leave. Their handlers wake up by it.
            self._server.abort_all()
            await self._wait(self.exchanges.wait_empty(), 0.2)
        seconds = max(0.5, ends - time.monotonic())
        await self._wait(hooks.stop(seconds * 0.8), seconds)

    def _report_open(self) -> None:
        """Log what is waited for; the line comes when Redis has answered, and nothing waits for it."""
        if not len(self.exchanges):
            return  # nothing to wait for is no news
        ids = self.hooks.open_ids() or self.exchanges.ids()
        left = self.status.seconds_left()
        shown = (
            str(self.status.state),
            "no deadline" if left is None else f"{left:.0f} s left",
            ", ".join(f"{name}={n}" for name, n in self.exchanges.snapshot().items()) or "none",
            ", ".join(ids[:MAX_IDS]) + (f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else "") or "none",
        )
        level = logging.WARNING if time.monotonic() - self._began >= WARN_AFTER else logging.INFO
        task = asyncio.get_running_loop().create_task(self._log_open(level, *shown), name="drain-report")
        task.add_done_callback(_report)

    async def _log_open(self, level: int, state: str, left: str, exchanges: str, ids: str) -> None:
        try:
            async with asyncio.timeout(DESCRIBE_SECONDS):
                details = await self.hooks.describe()
        except (TimeoutError, SluiceError):
            details = "redis does not answer"
        logger.log(
            level,
            "draining (%s): %s; exchanges: %s; %s; open: %s",
            state,
            left,
            exchanges,
            details or "no requests",
            ids,
            extra={"event": "drain_progress"},
        )

    async def _wait(self, waited: Awaitable[Any], seconds: float) -> None:
        """Wait for something, at most so long; what it raises is logged, and the drain goes on.

        Something that does not heed its cancellation is left behind: nothing may hold up a drain.
        """
        task = asyncio.ensure_future(waited)
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            if not task.done():
                task.cancel()
        if task.done():
            _report(task)


def _report(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        logger.error("a step of the drain failed", exc_info=exc)


class _Watchdog:
    """Ends the process in time even where the event loop, or a thread at exit, is stuck."""

    def __init__(self, seconds: float) -> None:
        self.drained = threading.Event()
        self._seconds = seconds
        threading.Thread(target=self._watch, name="drain-watchdog", daemon=True).start()

    def _watch(self) -> None:
        if not self.drained.wait(self._seconds):
            logger.critical("the drain did not end within %g s; leaving", self._seconds)
            os._exit(1)
        # All is settled. What is left is somebody's thread that the interpreter would wait for.
        time.sleep(LEAVE_SECONDS)
        os._exit(0)
