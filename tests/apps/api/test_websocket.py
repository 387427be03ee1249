"""The WebSocket protocol (WS-01, SE-01)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import websockets

from apps.api import websocket
from tests.apps.api.live import Site
from tests.apps.api.sockets import hear, opened, tell, until
from tests.support import eventually

pytestmark = pytest.mark.timeout(180)


async def test_generate_and_the_same_text_as_over_http(site: Site) -> None:
    async with opened(site) as socket, site.client() as client:
        assert socket.subprotocol == "sluice.v1"
        await tell(socket, type="generate", id="a", model="demo", prompt="hi", max_tokens=12, temperature=0, seed=3)
        seen = await until(socket, "done")
        reply = await client.post(
            "/generate",
            json={"model": "demo", "prompt": "hi", "max_tokens": 12, "temperature": 0, "seed": 3, "stream": False},
        )
    assert seen[0]["type"] == "accepted"
    assert seen[0]["request_id"].startswith("gen-")
    text = "".join(m["text"] for m in seen if m["type"] == "delta")
    assert text == reply.json()["text"]
    assert seen[-1]["finish_reason"] == "length"
    assert seen[-1]["usage"] == reply.json()["usage"]
    assert seen[-1]["timings"]["ttft_ms"] <= seen[-1]["timings"]["total_ms"]
    assert {m["id"] for m in seen} == {"a"}


async def test_several_at_once_and_cancel_of_one(site: Site) -> None:
    async with opened(site) as socket:
        for ref in ("a", "b"):
            await tell(socket, type="generate", id=ref, model="slow", prompt=ref, max_tokens=400, ignore_eos=True)
        await tell(
            socket, type="generate", id="c", model="slow", messages=[{"role": "user", "content": "x"}], max_tokens=5
        )
        await until(socket, "done", "c")
        await tell(socket, type="cancel", id="a")
        done = (await until(socket, "done", "a"))[-1]
        assert done["finish_reason"] == "cancelled"
        assert 0 < done["usage"]["completion_tokens"] < 400
        await until(socket, "delta", "b")
        await tell(socket, type="cancel", id="a")
        assert (await until(socket, "error", "a"))[-1]["error"]["code"] == "not_found"
        await tell(socket, type="generate", id="b", model="slow", prompt="x")
        assert (await until(socket, "error", "b"))[-1]["error"]["code"] == "duplicate_id"
        await until(socket, "delta", "b")


BAD_FRAMES: list[Any] = [
    "[1,2]", "5", "null", '"x"', "{", "", b"\x00\x01", b"\xff\xfe", '{"type":"bogus","id":"x"}', '{"id":"x"}',
    '{"type":"generate","model":"demo","prompt":"x"}', '{"type":"cancel"}', '{"type":"ping","foo":1}', "{" * 10_000,
]  # fmt: skip


async def test_ws_01_bad_frames_are_answered_and_the_generation_goes_on(site: Site) -> None:
    logged = len(site.log.read_text())
    async with opened(site) as socket:
        await tell(socket, type="generate", id="a", model="slow", prompt="x", max_tokens=60, ignore_eos=True)
        for frame in BAD_FRAMES:
            await socket.send(frame)
            error = (await until(socket, "error"))[-1]
            assert error["id"] in (None, "x")
            assert error["error"]["message"]
        done = (await until(socket, "done", "a"))[-1]
        assert done["usage"]["completion_tokens"] == 60
    assert "Traceback" not in site.log.read_text()[logged:]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": 0}, None),
        ({"model": "nope"}, "model_not_found"),
        ({"prompt": "x" * 5000}, "context_length_exceeded"),
        ({"temperature": "hot"}, None),
        ({"stream": False}, "unsupported_parameter"),
    ],
)
async def test_wrong_generate_messages(site: Site, fields: Any, code: str | None) -> None:
    async with opened(site) as socket:
        await tell(socket, **{"type": "generate", "id": "a", "model": "demo", "prompt": "x", **fields})
        error = (await until(socket, "error"))[-1]
        assert 400 <= error["status"] < 500
        assert code in (None, error["error"]["code"])
        await tell(socket, type="ping", id="p")
        assert await hear(socket) == {"type": "pong", "id": "p"}


async def test_ws_01_a_burst_is_answered_frame_by_frame(site: Site) -> None:
    logged = len(site.log.read_text())
    async with opened(site) as socket:
        await tell(socket, type="generate", id="a", model="slow", prompt="x", max_tokens=2000, ignore_eos=True)
        await until(socket, "delta", "a")
        for _ in range(1000):
            await socket.send("[]")
        for _ in range(1000):
            await until(socket, "error")
        await until(socket, "delta", "a")  # it has gone on all the time
        await tell(socket, type="cancel", id="a")
        assert (await until(socket, "done", "a"))[-1]["finish_reason"] == "cancelled"
    said = site.log.read_text()[logged:]
    assert "Traceback" not in said
    assert said.count("\n") < 100, "a line for each would be a flood"


async def test_too_many_messages_close_4429(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(websocket.time, "monotonic", lambda: now)
    consumer, closed, answers = websocket.StreamConsumer(), [], []

    async def close(code: int = 1000, reason: str = "") -> None:
        closed.append(code)

    async def send_json(message: dict[str, Any]) -> None:
        answers.append(message["type"])

    monkeypatch.setattr(consumer, "close", close)
    monkeypatch.setattr(consumer, "send_json", send_json)
    for _ in range(websocket.BURST):
        await consumer.on_text('{"type":"ping"}')
    assert not closed
    now += 1.0  # what a second allows
    for _ in range(int(websocket.RATE)):
        await consumer.on_text('{"type":"ping"}')
    assert not closed
    await consumer.on_text('{"type":"ping"}')
    assert closed == [4429]
    assert len(answers) == websocket.BURST + websocket.RATE


async def test_ws_01_an_oversized_frame_closes_1009(site: Site) -> None:
    async with opened(site) as socket:
        with pytest.raises(websockets.ConnectionClosed) as caught:
            await socket.send("x" * 5_000_000)
            await asyncio.wait_for(socket.recv(), 10)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_se_01_strangers_are_refused_before_accept(site: Site, headers: dict[str, str], status: int) -> None:
    if "Origin" in headers:
        headers = {**headers, "Authorization": f"Bearer {site.key}"}
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with opened(site, additional_headers=headers):
            pass
    assert caught.value.response.status_code in ({status} if status == 403 else {401, 403})


async def test_another_subprotocol_is_refused(site: Site) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with opened(site, subprotocols=["graphql-ws"]):
            pass
    assert caught.value.response.status_code == 400


async def test_a_ticket_opens_a_socket_once(site: Site) -> None:
    async with site.client() as client:
        ticket = (await client.post("/v1/tickets")).json()["ticket"]
    origin = {"Origin": site.url}
    protocols = ["sluice.v1", f"sluice.ticket.{ticket}"]
    async with opened(site, additional_headers=origin, subprotocols=protocols) as socket:
        assert socket.subprotocol == "sluice.v1"
        await tell(socket, type="ping")
        assert (await hear(socket))["type"] == "pong"
    with pytest.raises(websockets.InvalidStatus):
        async with opened(site, additional_headers=origin, subprotocols=protocols):
            pass


async def test_attach_reads_on_where_another_socket_stopped(site: Site) -> None:
    async with opened(site) as socket:
        await tell(
            socket, type="generate", id="a", model="slow", prompt="x", max_tokens=30, ignore_eos=True, resumable=True
        )
        seen = await until(socket, "delta")
        request_id = seen[0]["request_id"]
        last = seen[-1]["seq"]
        text = "".join(m["text"] for m in seen if m["type"] == "delta")
    async with opened(site) as socket:
        await tell(socket, type="attach", id="z", request_id=request_id, after=last)
        seen = await until(socket, "done")
        text += "".join(m["text"] for m in seen if m["type"] == "delta")
        await tell(socket, type="attach", id="y", request_id=request_id, after=None)
        whole = "".join(m["text"] for m in await until(socket, "done") if m["type"] == "delta")
        assert text == whole
        await tell(socket, type="attach", id="x", request_id="gen-none")
        error = (await until(socket, "error"))[-1]["error"]
        assert (error["code"], error["param"]) == ("request_not_found", "request_id")


async def test_a_reader_is_told_that_another_has_taken_over(site: Site) -> None:
    """By a code of its own: after "detached" clients attach again, and two of them would never stop."""
    asked = {"model": "slow", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "resumable": True}
    async with opened(site) as first, opened(site) as second:
        await tell(first, type="generate", id="a", **asked)
        request_id = (await until(first, "delta"))[0]["request_id"]
        await tell(second, type="attach", id="b", request_id=request_id)
        told = (await until(first, "error"))[-1]
        assert (told["error"]["code"], told["status"]) == ("superseded", 409)
        await until(second, "done")


async def test_a_dropped_socket_cancels_its_generations(site: Site) -> None:
    async with opened(site) as socket:
        await tell(socket, type="generate", id="a", model="one", prompt="x", max_tokens=2000, ignore_eos=True)
        request_id = (await until(socket, "delta"))[0]["request_id"]
    async with site.client() as client:

        async def gone() -> bool:
            return (await client.get(f"/v1/requests/{request_id}")).status_code == 404

        await eventually(gone, what="the request is no longer alive")


async def test_a_message_that_is_no_strict_json_is_answered_under_its_reference(site: Site) -> None:
    async with opened(site) as socket:
        for wrong in ('"temperature": NaN', '"prompt": "\\ud800"', '"max_tokens": Infinity'):
            await socket.send('{"type": "generate", "id": "a", ' + wrong + "}")
            error = await hear(socket)
            assert (error["type"], error["id"], error["status"]) == ("error", "a", 400)
        await socket.send('{"type": "generate", "id": "\\ud800"}')
        assert (await hear(socket))["id"] is None


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ('\ufeff{"type": "generate", "id": "a", "prompt": "x"}', "a"),
        ('{"type": "generate", "id": "a", "prompt": ' + DEEP, "a"),
        ('\ufeff{"type": "generate", "max_tokens": 5, "stream": true, "id": "a \\"b\\"", "x": ' + DEEP, 'a "b"'),
        ('{"messages": [{"id": "not mine"}], "x": ' + DEEP + ', "id": "a"}', None),
        ('{"x": ' + DEEP + ', "id": "a"}', None),
        ('{"id": ' + DEEP, None),
        ('{"prompt": "{\\"id\\": \\"not mine\\"", "x": ' + DEEP, None),
        ('[{"id": "not mine"}]', None),
    ],
    ids=["mark", "deep", "mark and deep", "behind a list", "behind the depth", "deep itself", "in a text", "in a list"],
)
async def test_a_message_that_can_not_be_read_is_answered_under_its_reference_where_it_shows(
    site: Site, text: str, ref: str | None
) -> None:
    async with opened(site) as socket:
        await socket.send(text)
        error = await hear(socket)
        assert (error["type"], error["id"], error["status"]) == ("error", ref, 400)


async def test_a_cancel_right_behind_its_generate_is_answered(site: Site) -> None:
    async with opened(site) as socket:
        for _ in range(20):
            await tell(socket, type="generate", id="a", model="demo", prompt="x", max_tokens=2000)
            await tell(socket, type="cancel", id="a")
            await until(socket, "done", "a")
