"""Every way in which the WebSocket closes or is refused: one test per documented code."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import websockets
from asgiref.testing import ApplicationCommunicator
from websockets.asyncio.client import connect

from apps.accounts.principal import Principal
from apps.api import asyncapi, websocket
from sluice.consumers import HttpError
from tests.apps.api import live
from tests.apps.api.live import Site
from tests.apps.api.sockets import hear, opened, tell, until
from tests.support import eventually

pytestmark = pytest.mark.timeout(180)
CALLER = Principal(
    owner="key:test",
    user_id=None,
    is_staff=False,
    scopes=frozenset({"generate", "read"}),
    allowed_models=None,
    label="test",
    via="key",
)


def close_of(caught: pytest.ExceptionInfo[websockets.ConnectionClosed]) -> tuple[int, str]:
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


async def refused(site: Site, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error object of a handshake that must fail."""
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with opened(site, **options):
            pass
    reply = caught.value.response
    assert reply.headers["content-type"] == "application/json"
    return reply.status_code, json.loads(reply.body or b"")["error"]


async def asgi(monkeypatch: pytest.MonkeyPatch, answer: Any, **scope: Any) -> ApplicationCommunicator:
    """The consumer on a server that can not answer a handshake with a status, after its first message."""

    async def check(rule: str, scope: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("sluice.access.check", check)
    whole = {"type": "websocket", "headers": [], "subprotocols": [], "sluice.route": SimpleNamespace(access="key")}
    talk = ApplicationCommunicator(websocket.StreamConsumer.as_asgi(), {**whole, **scope})
    await talk.send_input({"type": "websocket.connect"})
    return talk


async def test_4400_another_subprotocol(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    status, error = await refused(site, subprotocols=["graphql-ws"])
    assert (status, error["code"]) == (400, "unknown_subprotocol")
    assert "sluice.v1" in error["message"]
    talk = await asgi(monkeypatch, CALLER, subprotocols=["graphql-ws"])
    assert await talk.receive_output() == {"type": "websocket.close", "code": 4400}


async def test_4401_a_wrong_key_is_told_what_is_wrong(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    status, error = await refused(site, additional_headers={"Authorization": "Bearer wrong"})
    assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
    assert "unknown, expired or revoked" in error["message"]
    talk = await asgi(monkeypatch, HttpError(401, "no"))
    assert await talk.receive_output() == {"type": "websocket.close", "code": 4401}


async def test_4401_a_key_revoked_while_the_socket_is_open(site: Site) -> None:
    secret = live.new_key(site)
    async with opened(site, additional_headers={"Authorization": f"Bearer {secret}"}) as socket:
        await tell(socket, type="generate", id="a", model="demo", prompt="x", max_tokens=2)
        await until(socket, "done", "a")
        live.manage(site, "apikey", "revoke", secret)
        numbers = itertools.count()

        async def ask() -> None:
            ref = f"b{next(numbers)}"
            await tell(socket, type="generate", id=ref, model="demo", prompt="x", max_tokens=2)
            await until(socket, "done", ref)

        # Keys are believed for a second after they were looked up.
        with pytest.raises(websockets.ConnectionClosed) as caught:
            await eventually(ask, 15, every=0.05, what="the socket is closed")
    assert close_of(caught)[0] == 4401


async def test_4403_a_foreign_origin_or_a_key_without_the_right(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"Authorization": f"Bearer {site.key}", "Origin": "http://evil.example"}
    status, error = await refused(site, additional_headers=headers)
    assert (status, error["code"]) == (403, "origin_not_allowed")
    reader = Principal(
        **{**{f: getattr(CALLER, f) for f in CALLER.__dataclass_fields__}, "scopes": frozenset({"read"})}
    )
    talk = await asgi(monkeypatch, reader)
    assert await talk.receive_output() == {"type": "websocket.close", "code": 4403}
    talk = await asgi(monkeypatch, HttpError(403, "no"))
    assert await talk.receive_output() == {"type": "websocket.close", "code": 4403}


async def test_4408_nothing_said_and_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "IDLE_SECONDS", 0.2)
    talk = await asgi(monkeypatch, CALLER, subprotocols=["sluice.v1"])
    assert await talk.receive_output() == {"type": "websocket.accept", "subprotocol": "sluice.v1"}
    closed = await talk.receive_output(10)
    assert (closed["type"], closed["code"]) == ("websocket.close", 4408)
    await talk.send_input({"type": "websocket.disconnect", "code": 4408})
    await talk.wait()


async def test_4408_never_while_something_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "IDLE_SECONDS", 0.05)
    consumer = websocket.StreamConsumer()
    consumer.open = True
    consumer._heard -= 10.0
    consumer.tasks["a"] = work = asyncio.create_task(asyncio.Event().wait())
    consumer._watch_idle()
    assert consumer.open
    assert consumer._watch is not None
    consumer._watch.cancel()
    work.cancel()


async def test_4429_more_messages_than_a_client_needs(site: Site) -> None:
    async with opened(site) as socket:
        with pytest.raises(websockets.ConnectionClosed) as caught:
            async with asyncio.timeout(60):
                await asyncio.gather(_flood(socket), _drink(socket))
    assert close_of(caught)[0] == 4429


async def _flood(socket: Any) -> None:
    for _ in range(websocket.BURST * 20):
        await socket.send('{"type":"ping"}')
        await asyncio.sleep(0)  # and hear what is said meanwhile
    await socket.wait_closed()


async def _drink(socket: Any) -> None:
    while True:
        await socket.recv()


async def test_1009_a_message_that_is_too_big(site: Site) -> None:
    async with opened(site) as socket:
        with pytest.raises(websockets.ConnectionClosed) as caught:
            await socket.send(json.dumps({"type": "ping", "id": "x" * 2_000_000}))
            await hear(socket)
    assert close_of(caught)[0] == 1009


async def test_1012_the_server_goes_and_what_runs_is_finished_first(site: Site) -> None:
    with live.another_server(site) as (url, server):
        headers = {"Authorization": f"Bearer {site.key}"}
        host = url.removeprefix("http://")
        async with (
            connect(f"ws://{host}/ws/v1/stream", additional_headers=headers) as busy,
            connect(f"ws://{host}/ws/v1/stream", additional_headers=headers) as idle,
        ):
            await tell(busy, type="generate", id="a", model="slow", prompt="x", max_tokens=30, ignore_eos=True)
            await until(busy, "delta", "a")
            server.send_signal(signal.SIGTERM)
            with pytest.raises(websockets.ConnectionClosed) as caught:
                await hear(idle)
            assert close_of(caught) == (1012, "server restarts")
            await tell(busy, type="generate", id="b", model="demo", prompt="x")
            seen = await until(busy, "done", "a")
            assert [m["error"]["code"] for m in seen if m["id"] == "b"] == ["shutting_down"]
            assert seen[-1]["usage"]["completion_tokens"] == 30
            with pytest.raises(websockets.ConnectionClosed) as caught:
                await hear(busy)
            assert close_of(caught)[0] == 1012


def test_all_documented_codes_are_tested_here() -> None:
    tested = {
        int(name.split("_")[1]) for name in globals() if name.startswith("test_") and name.split("_")[1].isdigit()
    }
    assert tested == set(asyncapi.CLOSE_CODES) - {1000}
