"""The consumer base, in memory: order of the checks, tasks owned, errors in one shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from sluice import conf, runtime
from sluice.conf import ServerConfig
from sluice.consumers import HttpError, Refuse, StreamingHttpConsumer, StreamingWebSocketConsumer, live_consumers
from sluice.routes import Route
from sluice.status import ServerState, ServerStatus
from tests.support import eventually, turns

DISCONNECT = {"type": "http.disconnect"}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(conf, "_current", ServerConfig(max_body_bytes=1000, read_timeout=0.2))
    monkeypatch.setattr(runtime, "status", ServerStatus())
    yield
    assert live_consumers() == []


class Talk:
    """One exchange with a consumer."""

    def __init__(self, consumer: Any, scope: dict[str, Any]) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.consumer = consumer
        self.task = asyncio.ensure_future(consumer(scope, self.incoming.get, self.send))

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def end(self) -> Talk:
        async with asyncio.timeout(5):
            await self.task
        return self

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        assert not self.sent[-1].get("more_body")
        return b"".join(m["body"] for m in self.sent[1:])

    @property
    def code(self) -> str:
        return json.loads(self.body)["error"]["code"]


def exchange(consumer: StreamingHttpConsumer, method: str = "POST", body: bytes | None = b"{}", **route: Any) -> Talk:
    route = {"access": "public", "methods": ("POST",), **route}
    scope = {
        "type": "http",
        "method": method,
        "path": "/x",
        "headers": [],
        "query_string": b"",
        "sluice.route": Route("x", "x", **route),
        "sluice.request_id": "req-1",
    }
    talk = Talk(consumer, scope)
    if body is not None:
        talk.incoming.put_nowait({"type": "http.request", "body": body})
    return talk


class Answer(StreamingHttpConsumer):
    ran = False

    async def post(self, body: bytes) -> None:
        self.ran = True
        await self.send_json(200, {"got": len(body)})


async def test_answers_and_the_body_in_parts() -> None:
    talk = exchange(Answer(), body=None)
    for part, more in ((b"abc", True), (b"", True), (b"de", False)):
        talk.incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})
    await talk.end()
    assert talk.status == 200
    assert json.loads(talk.body) == {"got": 5}


async def test_method_then_access_then_drain_then_body() -> None:
    """Each check comes before the next one costs anything: nothing of the body is read for a 401."""
    runtime.status.move(ServerState.REFUSING)

    class Locked(Answer):
        async def authorize(self) -> Any:
            raise HttpError(401, "no", code="invalid_api_key")

    assert (await exchange(Locked(), "DELETE", None, inference=True).end()).status == 405
    assert (await exchange(Locked(), "POST", None, inference=True).end()).code == "invalid_api_key"
    refused = await exchange(Answer(), "POST", None, inference=True).end()
    assert (refused.status, refused.code) == (503, "shutting_down")
    assert int(refused.headers[b"retry-after"]) >= 1
    assert refused.headers[b"connection"] == b"close"
    # What starts no generation is still answered.
    assert (await exchange(Answer(), "POST").end()).status == 200


async def test_everything_is_still_accepted_while_pausing() -> None:
    runtime.status.move(ServerState.PAUSING)
    assert (await exchange(Answer(), inference=True).end()).status == 200


async def test_unknown_callers_are_refused_unless_the_route_is_public() -> None:
    class Ask(StreamingHttpConsumer):
        async def authorize(self) -> Any:
            assert self.route.access == "key"
            raise HttpError(401, "no")

    assert (await exchange(Ask(), "POST", access="key").end()).status == 401


@pytest.mark.parametrize(
    ("length", "parts", "status"),
    [
        (b"1000", [b"x" * 1000], 200),
        (b"1001", [], 413),
        (None, [b"x" * 600, b"x" * 401], 413),
        (b"5", [], 408),
    ],
)
async def test_body_limits(length: bytes | None, parts: list[bytes], status: int) -> None:
    consumer = Answer()
    talk = exchange(consumer, body=None)
    if length:
        consumer.scope = None  # set again by the call, which has not begun
        talk.task.cancel()
        await asyncio.gather(talk.task, return_exceptions=True)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/x",
            "headers": [(b"content-length", length)],
            "sluice.route": Route("x", "x", access="public", methods=("POST",)),
        }
        talk = Talk(consumer, scope)
    for i, part in enumerate(parts):
        talk.incoming.put_nowait({"type": "http.request", "body": part, "more_body": i < len(parts) - 1})
    await talk.end()
    if not length:
        talk.task.cancel()
    assert talk.status == status
    assert consumer.ran is (status == 200)
    if status != 200:
        assert talk.headers[b"connection"] == b"close"


async def test_disconnect_in_the_body_never_enters_the_handler() -> None:
    consumer = Answer()
    talk = exchange(consumer, body=None)
    talk.incoming.put_nowait({"type": "http.request", "body": b"a", "more_body": True})
    talk.incoming.put_nowait(DISCONNECT)
    await talk.end()
    assert talk.sent == []
    assert not consumer.ran


class Steps(StreamingHttpConsumer):
    """Notes what it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.entered = asyncio.Event()

    async def post(self, body: bytes) -> None:
        try:
            self.entered.set()
            self.steps.append("entered")
            await asyncio.Event().wait()
        finally:
            await turns()
            self.steps.append("cleaned")


async def test_disconnect_cancels_the_handler_and_waits_for_its_clean_up() -> None:
    consumer = Steps()
    talk = exchange(consumer)
    await consumer.entered.wait()
    talk.incoming.put_nowait(DISCONNECT)
    await talk.end()
    assert consumer.steps == ["entered", "cleaned"]
    assert talk.sent == []


async def test_disconnect_right_behind_the_body() -> None:
    """The handler's task is cancelled before its first step or after: never left half way."""
    consumer = Steps()
    talk = exchange(consumer)
    talk.incoming.put_nowait(DISCONNECT)
    await talk.end()
    assert consumer.steps in ([], ["entered", "cleaned"])


async def test_cancelled_consumer_cleans_up_before_it_ends() -> None:
    consumer = Steps()
    talk = exchange(consumer)
    await consumer.entered.wait()
    talk.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talk.task
    assert consumer.steps == ["entered", "cleaned"]


async def test_consumer_cancelled_again_still_waits_for_the_clean_up() -> None:
    consumer = Steps()
    talk = exchange(consumer)
    await consumer.entered.wait()
    for _ in range(3):
        talk.task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await talk.task
    assert consumer.steps == ["entered", "cleaned"]


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    for _ in range(3):
        await exchange(Answer()).end()
        consumer = Steps()
        talk = exchange(consumer)
        await consumer.entered.wait()
        talk.incoming.put_nowait(DISCONNECT)
        await talk.end()
    assert asyncio.all_tasks() == before


async def test_clean_up_that_fails_is_reported_not_swallowed(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Steps):
        async def post(self, body: bytes) -> None:
            try:
                await super().post(body)
            finally:
                raise RuntimeError("in the clean-up")

    consumer = Bad()
    talk = exchange(consumer)
    await consumer.entered.wait()
    talk.incoming.put_nowait(DISCONNECT)
    await talk.end()
    assert "in the clean-up" in caplog.text


async def test_error_before_headers_is_a_json_500_without_internals(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StreamingHttpConsumer):
        async def post(self, body: bytes) -> None:
            raise RuntimeError("/secret/path")

    talk = await exchange(Broken()).end()
    assert (talk.status, talk.code) == (500, "internal_error")
    assert b"secret" not in talk.body
    assert "/secret/path" in caplog.text


async def test_error_after_headers_is_an_event_and_the_body_ends() -> None:
    class Broken(StreamingHttpConsumer):
        async def post(self, body: bytes) -> None:
            await self.start_sse()
            await self.ping()
            raise RuntimeError("/secret/path")

    talk = await exchange(Broken()).end()
    assert talk.status == 200
    assert talk.headers[b"content-type"].startswith(b"text/event-stream")
    assert talk.headers[b"cache-control"] == b"no-cache"
    assert talk.headers[b"x-accel-buffering"] == b"no"
    events = talk.body.split(b"\n\n")
    assert events[0] == b": ping"
    assert json.loads(events[1].removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert b"secret" not in talk.body


async def test_forgotten_reply_and_forgotten_end() -> None:
    class Nothing(StreamingHttpConsumer):
        async def post(self, body: bytes) -> None:
            pass

    class Endless(StreamingHttpConsumer):
        async def post(self, body: bytes) -> None:
            await self.start_sse()

    assert (await exchange(Nothing()).end()).status == 500
    assert (await exchange(Endless()).end()).body == b""


@pytest.mark.parametrize("streaming", [False, True])
async def test_shut_down(streaming: bool) -> None:
    class Long(Steps):
        async def post(self, body: bytes) -> None:
            if streaming:
                await self.start_sse()
            await super().post(body)

    consumer = Long()
    talk = exchange(consumer)
    await consumer.entered.wait()
    await consumer.shut_down()
    await talk.end()
    assert consumer.steps == ["entered", "cleaned"]
    assert talk.status == (200 if streaming else 503)
    assert b"shutting_down" in talk.body


# --- WebSocket ------------------------------------------------------------------------


class Sock(StreamingWebSocketConsumer):
    subprotocols = ("sluice.v1",)

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    async def on_text(self, text: str) -> None:
        if text == "fail":
            raise RuntimeError("secret")
        self.spawn(text, self.work(text))

    async def work(self, name: str) -> None:
        try:
            self.log.append(f"{name} runs")
            if name != "short":
                await asyncio.Event().wait()
        finally:
            await turns()
            self.log.append(f"{name} ends")

    async def on_close(self, code: int) -> None:
        self.log.append(f"closed {code} {len(self.tasks)}")


def socket(consumer: StreamingWebSocketConsumer, **scope: Any) -> Talk:
    base = {
        "type": "websocket",
        "path": "/ws",
        "headers": [],
        "query_string": b"",
        "subprotocols": [],
        "sluice.route": Route("ws", "x", access="public", kind="websocket"),
    }
    talk = Talk(consumer, {**base, **scope})
    talk.incoming.put_nowait({"type": "websocket.connect"})
    return talk


def text(talk: Talk, *messages: str) -> None:
    for message in messages:
        talk.incoming.put_nowait({"type": "websocket.receive", "text": message})


async def test_socket_receives_while_its_tasks_run_and_ends_them() -> None:
    consumer = Sock()
    talk = socket(consumer, subprotocols=["x", "sluice.v1"])
    text(talk, "a", "b")
    await turns()
    assert talk.sent[0] == {"type": "websocket.accept", "subprotocol": "sluice.v1"}
    assert consumer.log == ["a runs", "b runs"]
    assert consumer.cancel("a")
    assert not consumer.cancel("c")
    talk.incoming.put_nowait({"type": "websocket.disconnect", "code": 1001})
    await talk.end()
    assert sorted(consumer.log[2:4]) == ["a ends", "b ends"]
    assert consumer.log[4] == "closed 1001 0"


async def test_a_key_runs_once() -> None:
    consumer = Sock()
    talk = socket(consumer)
    text(talk, "a", "a")
    await turns()
    assert consumer.log == ["a runs"]
    # The second one was an error of that message; the default closes the socket.
    assert talk.sent[-1]["code"] == 1011
    talk.incoming.put_nowait({"type": "websocket.disconnect"})
    await talk.end()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Refuse(4429, 429), (429, 4429)),
        (HttpError(401, "no"), (401, 4401)),
    ],
)
async def test_refused_before_accept(error: Exception, expected: tuple[int, int]) -> None:
    class Shut(Sock):
        async def authorize(self) -> Any:
            raise error

    status, code = expected
    plain = await socket(Shut()).end()
    assert plain.sent == [{"type": "websocket.close", "code": code}]
    extended = await socket(Shut(), extensions={"websocket.http.response": {}}).end()
    assert extended.sent[0]["status"] == status


async def test_refused_while_draining() -> None:
    runtime.status.move(ServerState.REFUSING)
    talk = await socket(Sock(), extensions={"websocket.http.response": {}}).end()
    assert talk.sent[0]["status"] == 503
    assert b"retry-after" in dict(talk.sent[0]["headers"])


async def test_refused_where_the_drain_begins_during_the_handshake() -> None:
    """Before, such a socket was open, idle and unknown to the drain, which then waited for it to its deadline."""

    class Slow(Sock):
        async def authorize(self) -> Any:
            runtime.status.move(ServerState.REFUSING)

    talk = await socket(Slow(), extensions={"websocket.http.response": {}}).end()
    assert talk.status == 503


async def test_socket_closes_after_its_last_task_in_a_drain() -> None:
    consumer = Sock()
    talk = socket(consumer)
    text(talk, "a")
    await turns()
    runtime.status.move(ServerState.FINISHING)
    consumer.cancel("a")
    closed = {"type": "websocket.close", "code": 1012, "reason": "server restarts"}
    await eventually(lambda: talk.sent[-1] == closed, 5)
    talk.incoming.put_nowait({"type": "websocket.disconnect", "code": 1012})
    await talk.end()


async def test_socket_shut_down_ends_its_tasks_first() -> None:
    consumer = Sock()
    talk = socket(consumer)
    text(talk, "a")
    await turns()
    await consumer.shut_down()
    assert consumer.log == ["a runs", "a ends"]
    assert talk.sent[-1]["code"] == 1012
    talk.incoming.put_nowait({"type": "websocket.disconnect"})
    await talk.end()
