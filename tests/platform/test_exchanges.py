"""The count of open exchanges: up with each scope, down with its last body byte or its task's end."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as ws_connect

from sluice import logs
from sluice.exchanges import ExchangeMiddleware, ExchangeRegistry
from tests.platform.conftest import ServerProcess
from tests.support import eventually

pytestmark = pytest.mark.timeout(60)


def http_scope(path: str = "/x", headers: list[tuple[bytes, bytes]] | None = None) -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": path, "headers": headers or []}


class Wire:
    """Both ends of an ASGI connection, in memory."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.hold: asyncio.Event | None = None
        self.held: list[dict[str, Any]] = []

    async def send(self, message: Any) -> None:
        if self.hold is not None:
            self.held.append(message)
            await self.hold.wait()
        self.messages.append(message)


def serve(app: Any, scope: dict[str, Any] | None = None) -> tuple[ExchangeRegistry, Wire, asyncio.Task[None]]:
    registry, wire = ExchangeRegistry(), Wire()
    middleware = ExchangeMiddleware(app, registry, lambda scope: "/x")
    task = asyncio.ensure_future(middleware(scope or http_scope(), wire.incoming.get, wire.send))
    return registry, wire, task


async def test_streamed_body_counts_until_its_last_message() -> None:
    step = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await step.wait()
        await send({"type": "http.response.body", "body": b""})
        await asyncio.Event().wait()  # whatever the application does afterwards is not the exchange

    registry, _, task = serve(app)
    await asyncio.sleep(0)
    assert registry.snapshot() == {"sse /x": 1}
    step.set()
    async with asyncio.timeout(2):
        await registry.wait_empty()
    assert not task.done()
    assert registry.counts() == {}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(registry) == 0


async def test_last_byte_counts_while_the_connection_is_full() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all"})

    registry, wire, task = serve(app)
    wire.hold = asyncio.Event()
    await eventually(lambda: wire.held)
    assert len(registry) == 1
    wire.hold.set()
    await task
    assert len(registry) == 0


@pytest.mark.parametrize("how", ["returns", "raises", "is cancelled"])
async def test_abandoned_body_is_released(how: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if how == "raises":
            raise RuntimeError
        if how == "is cancelled":
            await asyncio.Event().wait()

    registry, _, task = serve(app)
    await asyncio.sleep(0)
    if how == "is cancelled":
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(registry) == 0
    assert registry.counts() == {}


async def test_a_failing_last_send_releases() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"a"})

    registry = ExchangeRegistry()

    async def broken(message: Any) -> None:
        raise OSError

    with pytest.raises(OSError):
        await ExchangeMiddleware(app, registry, lambda s: "/x")(http_scope(), None, broken)
    assert len(registry) == 0


async def test_websocket_counts_until_its_task_ends() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close"})
        await receive()

    registry, wire, task = serve(app, {"type": "websocket", "path": "/x", "headers": []})
    await asyncio.sleep(0)
    assert registry.snapshot() == {"websocket /x": 1}
    wire.incoming.put_nowait({"type": "websocket.disconnect"})
    await task
    assert len(registry) == 0


async def test_plain_bodies_pass_untouched_and_lifespan_is_not_counted() -> None:
    sent = [
        {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"own")]},
        {"type": "http.response.body", "body": b"all"},
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in sent:
            await send(message)

    _, wire, task = serve(app)
    await task
    assert wire.messages == sent
    registry, _, task = serve(app, {"type": "lifespan"})
    await task
    assert registry.total == 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc-1.2:3_x", True),
        (b"", False),
        (b"x" * 65, False),
        (b"a b", False),
        (b"a\xff", False),
        (b"<script>", False),
        (b"a\n", False),
    ],
)
async def test_request_id_is_taken_only_where_harmless(given: bytes, kept: bool) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(logs.request_id.get())
        assert scope["sluice.request_id"] == seen[0]
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    _, wire, task = serve(app, http_scope(headers=[(b"x-request-id", given)]))
    await task
    assert (seen[0] == given.decode("latin-1")) is kept
    assert dict(wire.messages[0]["headers"])[b"x-request-id"] == seen[0].encode()


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/nothing", "http unmatched"),
        ("/static/admin/css/base.css", "http static"),
        ("/static/nope.css", "http static"),
        ("/metrics", "http /metrics"),
        ("/readyz", "http /readyz"),
        ("/fail", "http /fail"),
        ("/silent", "http /silent"),
        ("/abandon", "http /abandon"),
        ("/gzipped", "http /gzipped"),
        ("/ticks?n=2", "sse /ticks"),
        ("/admin/login/", "http /admin/login/"),
        ("//ticks", "http unmatched"),
    ],
)
def test_every_route_is_back_to_zero(server: ServerProcess, path: str, label: str) -> None:
    try:
        httpx.get(server.url + path, headers={"accept-encoding": "gzip"}, timeout=10)
    except httpx.RemoteProtocolError:
        assert path == "/abandon"
    # The one that is left is the request that asks.
    state = server.wait_state(lambda s: s["open"] == 1)
    assert state["exchanges"] == {"http /state": 1}


def test_open_exchanges_are_seen_per_route(server: ServerProcess) -> None:
    ws = server.url.replace("http", "ws")
    with (
        httpx.stream("GET", server.url + "/ticks?n=1000&pace=0.05"),
        httpx.stream("GET", server.url + "/gzipped?n=60"),  # three seconds: the machine may be busy
        ws_connect(ws + "/ws") as sock,
    ):
        assert sock.recv(5) == "open"
        state = server.state()
        assert state["exchanges"] == {
            "http /gzipped": 1,
            "http /state": 1,
            "sse /ticks": 1,
            "websocket /ws": 1,
        }
    server.wait_state(lambda s: s["open"] == 1)


def test_refused_and_unknown_sockets_are_back_to_zero(server: ServerProcess) -> None:
    ws = server.url.replace("http", "ws")
    for path in ("/ws?refuse", "/nothing", "//ws"):
        with pytest.raises(InvalidStatus):
            ws_connect(ws + path)
    state = server.wait_state(lambda s: s["open"] == 1 and s["connections"] <= 1)
    assert state["exchanges"] == {"http /state": 1}


def test_body_behind_gzip_and_timeout_counts_after_its_handler_has_returned(server: ServerProcess) -> None:
    with httpx.stream("GET", server.url + "/gzipped", headers={"accept-encoding": "gzip"}) as response:
        assert response.headers["content-encoding"] == "gzip"
        state = server.wait_state(lambda s: "handler returned" in s["events"])
        assert state["exchanges"]["http /gzipped"] == 1
        # Each part is a member of its own: decode them all.
        assert gzip.decompress(b"".join(response.iter_raw())) == b"part " * 500
    state = server.wait_state(lambda s: s["open"] == 1)
    assert state["events"].count("handler returned") == state["events"].count("body ended")
