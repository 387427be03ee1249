"""The Daphne server of ``manage.py serve``."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from daphne.server import Server, twisted_loop
from twisted.internet import defer, reactor
from twisted.logger import STDLibLogObserver, globalLogBeginner

from inference import metrics
from inference.errors import SluiceError, StoreUnavailable
from sluice.conf import ServerConfig
from sluice.exchanges import ExchangeRegistry
from sluice.server.drain import Drain
from sluice.server.http import SluiceHTTPFactory
from sluice.server.transport import Transport
from sluice.server.websocket import SluiceWebSocketFactory
from sluice.status import ServerStatus

logger = logging.getLogger("sluice.server")

#: Bytes per body message to the application.
BODY_CHUNK = 256 * 1024


class SluiceServer(Server):
    """Serves one ASGI application on sockets that are already bound, until a drain has ended.

    Args:
        listeners: listening sockets; they may be shared with other processes.
        on_start: awaited in the loop before anything is accepted; a
            :class:`SluiceError` from it ends the process with exit code 1.
        on_ready: called once connections are accepted.
    """

    def __init__(
        self,
        application: Any,
        config: ServerConfig,
        *,
        listeners: list[socket.socket],
        status: ServerStatus,
        exchanges: ExchangeRegistry,
        drain: Drain,
        on_start: Callable[[], Awaitable[None]] | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        proxied = config.behind_proxy
        super().__init__(
            application,
            endpoints=["inherited"],
            signal_handlers=False,
            request_buffer_size=BODY_CHUNK,
            websocket_timeout=-1,
            # Slow here is never the client, whose request has arrived, but a server with many to greet at once.
            websocket_handshake_timeout=config.read_timeout,
            ping_interval=config.ws_ping_interval,
            ping_timeout=config.ws_ping_timeout,
            websocket_max_message_size=config.ws_max_message_bytes,
            websocket_max_frame_size=config.ws_max_message_bytes,
            proxy_forwarded_address_header="X-Forwarded-For" if proxied else None,
            proxy_forwarded_proto_header="X-Forwarded-Proto" if proxied else None,
            server_name="sluice",
        )
        self.config = config
        self.status = status
        self.exchanges = exchanges
        self.drain = drain
        self._sockets = listeners
        self._ports: list[Any] = []
        self._on_start = on_start
        self._on_ready = on_ready
        self._main: asyncio.Task[None] | None = None
        self.accepting = False
        self.exit_code = 0
        #: Open client connections and the HTTP channel that each began with.
        self.transports: dict[Any, Any] = {}
        self._all_closed: asyncio.Event | None = None
        #: Requests refused before they were complete, connections cut because they did not read,
        #: and WebSockets whose client stopped answering pings.
        self.refusals: Counter[str] = Counter()
        self.slow_clients = 0
        self.dead_peers = 0

    # --- life -------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until drained. Returns the process's exit code."""
        loop = twisted_loop
        asyncio.set_event_loop(loop)
        loop.add_signal_handler(signal.SIGTERM, self.drain.on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self.drain.on_sigint)
        loop.add_signal_handler(signal.SIGHUP, self.drain.on_sighup)
        self.drain.attach(self)
        self.connections: dict[Any, dict[str, Any]] = {}
        self.http_factory = SluiceHTTPFactory(self)
        self.ws_factory = SluiceWebSocketFactory(self, server=self.server_name)
        self.ws_factory.setProtocolOptions(
            autoPingTimeout=self.ping_timeout,
            allowNullOrigin=True,  # origins are judged by the access check, with the account in hand
            openHandshakeTimeout=self.websocket_handshake_timeout,
            maxMessagePayloadSize=self.websocket_max_message_size,
            maxFramePayloadSize=self.websocket_max_frame_size,
            failByDrop=False,  # a client that breaks a rule is told which, by a close code
        )
        observer = STDLibLogObserver(__name__) if self.verbosity > 1 else (lambda event: None)
        globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False, discardBuffer=True)
        reactor.addSystemEventTrigger("before", "shutdown", self.kill_all_applications)
        reactor.callWhenRunning(self._begin)
        reactor.run(installSignalHandlers=False)
        self._finish_loop(loop)
        return self.exit_code

    def _begin(self) -> None:
        if self.drain.started:
            return
        self._main = asyncio.ensure_future(self._start())
        self._main.add_done_callback(self._started)

    async def _start(self) -> None:
        if self._on_start is not None:
            await self._on_start()
        for sock in self._sockets:
            port = reactor.adoptStreamPort(sock.fileno(), sock.family, self.http_factory)
            port.transport = Transport
            self._ports.append(port)
            sock.close()
        reactor.callLater(2, self.timeout_checker)
        self.accepting = True
        if self._on_ready is not None:
            self._on_ready()

    def _started(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        exc = task.exception()
        if exc is not None:
            if isinstance(exc, StoreUnavailable):
                logger.error("cannot start: %s. Start Redis, or correct REDIS_URL.", str(exc).rstrip("."))
            elif isinstance(exc, SluiceError):
                logger.error("cannot start: %s", exc)
            else:
                logger.error("cannot start", exc_info=exc)
            self.exit_code = 1
            self.stop()

    def stop_listening(self) -> None:
        """Take no more connections; other processes on the same socket go on."""
        for port in self._ports:
            port.stopListening()
        self._ports.clear()

    def cancel_start(self) -> None:
        """Give up starting, where that has not ended."""
        if self._main is not None:
            self._main.cancel()

    @staticmethod
    def _finish_loop(loop: asyncio.AbstractEventLoop) -> None:
        """Let tasks that were cancelled at the last moment run their clean-up."""
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=0.3))

    # --- connections ------------------------------------------------------------------

    def opened(self, transport: Any, channel: Any) -> None:
        self.transports[transport] = channel

    def closed(self, transport: Any) -> None:
        self.transports.pop(transport, None)
        if not self.transports and self._all_closed is not None:
            self._all_closed.set()

    def close_idle(self) -> None:
        """Close keep-alive connections between two requests."""
        for transport, channel in list(self.transports.items()):
            if transport.protocol is channel:
                channel.close_if_idle()

    async def wait_closed(self) -> None:
        """Return once every connection has sent what it had and is closed."""
        self._all_closed = asyncio.Event()
        while self.transports:
            self._all_closed.clear()
            await self._all_closed.wait()

    def abort_all(self) -> None:
        for transport in list(self.transports):
            transport.abortConnection()

    def protocol_disconnected(self, protocol: Any) -> None:
        # Called once or twice, before or after the application has ended.
        details = self.connections.get(protocol)
        if details is None or "disconnected" in details:
            return
        details["disconnected"] = time.time()
        task = details.get("application_instance")
        if task is not None and not task.done():
            timer = asyncio.get_event_loop().call_later(self.application_close_timeout, self._overdue, task)
            task.add_done_callback(lambda _: timer.cancel())
        self._forget(protocol)

    def _overdue(self, task: asyncio.Task[Any]) -> None:
        logger.warning("an application took too long to end after its client had gone; it is cancelled")
        task.cancel()

    # --- applications -----------------------------------------------------------------

    def create_application(self, protocol: Any, scope: Any) -> Any:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        scope.setdefault("asgi", {"version": "3.0", "spec_version": "2.3"})
        receive: Callable[[], Awaitable[Any]] = queue.get
        if scope["type"] == "websocket":
            scope["extensions"] = {"websocket.http.response": {}}
            receive = partial(_receive_and_tell, queue, protocol)
        task = asyncio.ensure_future(self.application(scope, receive, partial(self.handle_reply, protocol)))
        self.connections[protocol]["application_instance"] = task
        task.add_done_callback(partial(self._application_done, protocol))
        return queue

    def _application_done(self, protocol: Any, task: asyncio.Task[Any]) -> None:
        exc = None if task.cancelled() else task.exception()
        if exc is not None:
            logger.error("exception inside the application", exc_info=exc, extra={"event": "application_error"})
        details = self.connections.get(protocol)
        if details is None:
            return
        if "disconnected" not in details:
            protocol.application_ended(exc)
        self._forget(protocol)

    def _forget(self, protocol: Any) -> None:
        """Drop a connection whose client has gone and whose application has ended."""
        details = self.connections.get(protocol)
        if details is not None and "disconnected" in details:
            task = details.get("application_instance")
            if task is None or task.done():
                del self.connections[protocol]

    async def handle_reply(self, protocol: Any, message: Any) -> None:
        """The application's ``send``: hand the message on, then wait while the connection is full."""
        details = self.connections.get(protocol)
        if details is None or "disconnected" in details:
            return
        try:
            self.check_headers_type(message)
        except ValueError:
            protocol.basic_error(500, b"Server Error", "Server Error")
            raise
        protocol.handle_reply(message)
        if protocol.gate.shut:
            await self._wait_writable(protocol)

    async def _wait_writable(self, protocol: Any) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.config.send_timeout):
                await protocol.gate.wait_open()
        except TimeoutError:
            self.slow_clients += 1
            metrics.SLOW_CLIENTS.inc()
            logger.warning(
                "client has not read for %g s; its connection is cut",
                self.config.send_timeout,
                extra={"event": "slow_client"},
            )
            protocol.abort()
        finally:
            metrics.SEND_PAUSED.inc(time.monotonic() - began)

    def kill_all_applications(self) -> Any:
        """Cancel what still runs when the loop is about to stop; but not for long."""
        tasks = []
        for details in self.connections.values():
            task = details.get("application_instance")
            if task is not None and not task.done():
                task.cancel()
                tasks.append(task)
        if not tasks:
            return None
        logger.warning("cancelled %d applications at the end of the drain", len(tasks))
        return defer.Deferred.fromFuture(asyncio.ensure_future(asyncio.wait(tasks, timeout=0.3)))


async def _receive_and_tell(queue: asyncio.Queue[Any], protocol: Any) -> Any:
    message = await queue.get()
    if message["type"] == "websocket.receive":
        protocol.message_taken()
    return message
