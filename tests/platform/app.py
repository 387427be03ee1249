"""The application of the server's own tests: real routing and base classes, handlers that need no worker.

Served by ``manage.py serve`` with ``SLUICE_ASGI_APPLICATION=tests.platform.app.application``.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from typing import Any
from urllib.parse import parse_qsl

from django.core.asgi import get_asgi_application

django_app = get_asgi_application()

from sluice import runtime  # noqa: E402
from sluice.application import build_application  # noqa: E402
from sluice.consumers import Refuse, StreamingHttpConsumer, StreamingWebSocketConsumer  # noqa: E402
from sluice.routes import OWN, Route  # noqa: E402
from tests.support import turns  # noqa: E402

#: What happened to handlers, in order; tests read it at /state.
events: list[str] = []
sent: dict[str, int] = {}


class Base(StreamingHttpConsumer):
    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.scope["query_string"].decode()))


class State(Base):
    async def get(self, body: bytes) -> None:
        server = runtime.server
        await self.send_json(
            200,
            {
                "pid": os.getpid(),
                "client": self.scope["client"],
                "exchanges": runtime.exchanges.snapshot(),
                "open": len(runtime.exchanges),
                "events": events,
                "sent": sent,
                "tasks": sorted(task.get_name() for task in asyncio.all_tasks()),
                "connections": len(server.connections),
                "transports": len(server.transports),
                "slow_clients": server.slow_clients,
                "dead_peers": server.dead_peers,
                "refusals": dict(server.refusals),
                "fds": len(os.listdir("/proc/self/fd")),
                "rss": rss(),
                "max_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "lag": runtime.lag.worst,
            },
        )


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Echo(Base):
    async def post(self, body: bytes) -> None:
        events.append(f"echo {len(body)}")
        await self.send_json(200, {"length": len(body)})


class Ticks(Base):
    """``n`` events, one per ``pace`` seconds, then ``[DONE]``."""

    async def get(self, body: bytes) -> None:
        await self.start_sse()
        try:
            for i in range(int(self.query.get("n", 5))):
                await self.send_sse_bytes(b"data: %d %.6f\n\n" % (i, time.monotonic()))
                await asyncio.sleep(float(self.query.get("pace", 0.01)))
            await self.send_sse_bytes(b"data: [DONE]\n\n")
        except asyncio.CancelledError:
            events.append("ticks cancelled")
            raise


class Flood(Base):
    """Events of ``size`` bytes as fast as the client takes them."""

    async def get(self, body: bytes) -> None:
        name, size = self.query["name"], int(self.query.get("size", 1000))
        sent[name] = 0
        await self.start_sse()
        try:
            for _ in range(int(self.query.get("n", 100_000))):
                await self.send_sse_bytes(b"data: " + b"x" * size + b"\n\n")
                sent[name] += size
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            events.append(f"flood {name} cancelled")
            raise


class Hang(Base):
    """Never answers; says so when it is cancelled, and takes a moment to clean up."""

    async def post(self, body: bytes) -> None:
        name = self.query["name"]
        events.append(f"hang {name} entered")
        try:
            await asyncio.Event().wait()
        finally:
            await turns()
            events.append(f"hang {name} cleaned")

    get = post


class Fail(Base):
    async def get(self, body: bytes) -> None:
        if self.query.get("after"):
            await self.start_sse()
            await self.send_sse_bytes(b"data: 1\n\n")
        raise RuntimeError("a secret detail")


class Silent(Base):
    async def get(self, body: bytes) -> None:
        pass


class Stick(Base):
    """Leaves a thread behind that does not end."""

    async def get(self, body: bytes) -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        await self.send_json(200, {})


class Sock(StreamingWebSocketConsumer):
    """``stream N PACE`` sends N texts; ``flood N SIZE`` as fast as it can; ``hang`` waits; ``fail`` raises.

    With the query ``refuse`` it refuses the handshake, with ``wait`` it never answers it.
    """

    subprotocols = ("sluice.v1",)

    async def authorize(self) -> Any:
        if self.scope["query_string"] == b"refuse":
            raise Refuse()
        if self.scope["query_string"] == b"wait":
            await asyncio.Event().wait()
        return None

    async def on_open(self) -> None:
        await self.send_text("open")

    async def on_text(self, text: str) -> None:
        verb, *args = text.split()
        if verb == "client":
            await self.send_text(str(self.scope["client"][0]))
        elif verb == "echo":
            await self.send_text(" ".join(args))
        elif verb == "fail":
            raise RuntimeError("a secret detail")
        else:
            self.spawn(verb, getattr(self, verb)(*args))

    async def on_error(self, exc: Exception) -> None:
        await self.send_text("error")

    async def stream(self, n: str, pace: str) -> None:
        for i in range(int(n)):
            await self.send_text(str(i))
            await asyncio.sleep(float(pace))
        await self.send_text("done")

    async def flood(self, name: str, n: str, size: str) -> None:
        sent[name] = 0
        try:
            for _ in range(int(n)):
                await self.send_text("x" * int(size))
                sent[name] += int(size)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            events.append(f"flood {name} cancelled")
            raise

    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await turns()
            events.append("socket task cleaned")

    async def on_close(self, code: int) -> None:
        events.append(f"socket closed {code} with {len(self.tasks)} tasks")


async def abandon(scope: Any, receive: Any, send: Any) -> None:
    """Starts a body, and returns without an end to it."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"some", "more_body": True})


def gzipped(scope: Any, receive: Any, send: Any) -> Any:
    """A streaming Django view behind GZip and a timeout middleware."""
    return _stacked(scope, receive, send)


async def _stacked(scope: Any, receive: Any, send: Any) -> None:
    from django.core.handlers.asgi import ASGIRequest
    from django.http import StreamingHttpResponse
    from django.middleware.gzip import GZipMiddleware

    parts = int(dict(parse_qsl(scope["query_string"].decode())).get("n", 5))

    async def body() -> Any:
        for _ in range(parts):
            yield b"part " * 100
            await asyncio.sleep(0.05)  # its pace; the handler returns long before its end

    request = ASGIRequest(scope, None)

    async def view(request: Any) -> Any:
        return StreamingHttpResponse(body(), content_type="text/plain")

    async def with_timeout(request: Any) -> Any:
        async with asyncio.timeout(5):
            return await view(request)

    response = await GZipMiddleware(with_timeout)(request)
    headers = [(k.lower().encode(), v.encode()) for k, v in response.items()]
    events.append("handler returned")
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for part in response:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    events.append("body ended")
    await send({"type": "http.response.body", "body": b""})


HERE = "tests.platform.app."
ROUTES = [
    *OWN,
    Route("state", HERE + "State", access="public"),
    Route("echo", HERE + "Echo", methods=("POST",), access="public"),
    Route("ticks", HERE + "Ticks", access="public", inference=True),
    Route("flood", HERE + "Flood", access="public"),
    Route("hang", HERE + "Hang", methods=("GET", "POST"), access="public", inference=True),
    Route("fail", HERE + "Fail", access="public"),
    Route("silent", HERE + "Silent", access="public"),
    Route("stick", HERE + "Stick", access="public"),
    Route("abandon", HERE + "abandon", access="public"),
    Route("gzipped", HERE + "gzipped", access="public"),
    Route("guarded/<str:part>", HERE + "Echo", methods=("POST",), access="key"),
    Route("ws", HERE + "Sock", access="public", kind="websocket"),
]

application = build_application(django_app, ROUTES)
