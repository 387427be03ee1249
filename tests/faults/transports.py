"""The ways in which a client reads an answer, behind one face."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.faults.harness import OPEN, Exchange, Rig, Server
from tests.support import eventually

TRANSPORTS = ["sse-chat", "sse-generate", "json-chat", "sse-completions", "ws"]
STREAMING = [t for t in TRANSPORTS if t != "json-chat"]
WHOLE = ["json-chat", "json-completions", "json-generate", "json-responses"]
"""Those that answer in one piece."""
EVERY = [*TRANSPORTS, *WHOLE[1:], "sse-responses"]
_PATHS = {
    "chat": "/v1/chat/completions",
    "generate": "/generate",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}


@dataclass
class Reply:
    """What a client has seen of an answer.

    Attributes:
        pieces: texts in order, as they came.
        times: when each came, by the clock of :func:`time.monotonic`.
        finish: the finish reason.
        done: ``[DONE]`` or ``done`` was the last word.
        error: the error event or body.
    """

    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: str | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    events: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.times.append(time.monotonic())


class Call:
    """One request of one client."""

    def __init__(self, rig: Rig, server: Server, kind: str) -> None:
        self.rig = rig
        self.server = server
        self.kind = kind
        self.whole = kind in WHOLE
        self.id = ""
        self.status = 0
        self.reply = Reply()
        self.exchange: Exchange | None = None
        self.socket: ClientConnection | None = None
        self._reader: asyncio.Task[Reply] | None = None

    @classmethod
    async def begin(
        cls, rig: Rig, server: Server, kind: str, tokens: int, *, prompt: str = "hi", find: bool = True,
        receive_buffer: int = 0, **fields: Any,
    ) -> Call:  # fmt: skip
        """Send a request; returns once its id is known (``find``) and nothing else has been read."""
        self = cls(rig, server, kind)
        fields = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "model": "scripted", **fields}
        before = {v.id for v in (await rig.views.page(0, 1000)).items} if find and self.whole else set()
        if kind == "ws":
            self.socket = await connect(
                f"ws://127.0.0.1:{server.port}/ws/v1/stream",
                additional_headers={"Authorization": f"Bearer {server.key}"},
                subprotocols=["sluice.v1"],  # type: ignore[list-item]
                open_timeout=10, ping_interval=None,
            )  # fmt: skip
            OPEN.append(self.socket)
            await self.socket.send(json.dumps({"type": "generate", "id": "1", "prompt": prompt, **fields}))
            if find:
                accepted = json.loads(await self.socket.recv())
                assert accepted["type"] == "accepted", accepted
                self.id = accepted["request_id"]
            return self
        endpoint = kind.partition("-")[2]
        if endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        elif endpoint == "responses":
            fields["input"], fields["max_output_tokens"] = prompt, fields.pop("max_tokens")
        else:
            fields["prompt"] = prompt
        fields["stream"] = not self.whole  # which /generate does unless told otherwise
        make = server.post if find and not self.whole else server.send
        self.exchange = await make(_PATHS[endpoint], fields, receive_buffer=receive_buffer)
        if find and self.whole:

            async def new() -> str:
                page = await rig.views.page(0, 1000)
                return next((v.id for v in page.items if v.id not in before), "")

            self.id = await eventually(new, what="the request is stored")
        elif find:
            assert self.exchange.status == 200, await self.exchange.body()
            self.id = self.exchange.headers["x-sluice-request"]
        return self

    def reading(self) -> asyncio.Task[Reply]:
        """Read to the end in a task; ``self.reply`` grows meanwhile."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        return self._reader

    async def finish(self, timeout: float = 60.0) -> Reply:
        """Read to the end of the response."""
        async with asyncio.timeout(timeout):
            return await self.reading()

    async def _read(self) -> Reply:
        try:
            if self.socket is not None:
                await self._read_socket(self.socket)
            elif self.whole:
                await self._read_json()
            else:
                await self._read_events()
        except (OSError, asyncio.IncompleteReadError):
            self.reply.error = {"code": "connection_lost"}
        return self.reply

    async def _read_socket(self, socket: ClientConnection) -> None:
        try:
            async for raw in socket:
                message = json.loads(raw)
                self.reply.events.append(str(raw))
                match message["type"]:
                    case "accepted":
                        self.id = message["request_id"]
                    case "delta":
                        self.reply.add(message["text"])
                    case "done":
                        self.reply.finish, self.reply.done = message["finish_reason"], True
                        await socket.close()
                    case "error":
                        self.reply.error = message["error"]
                        await socket.close()
        except ConnectionClosed as exc:
            if not self.reply.done:
                # Without a close frame, which is what a killed server leaves.
                code = str(exc.rcvd.code) if exc.rcvd else "connection_lost"
                self.reply.error = self.reply.error or {"code": code}

    async def _read_json(self) -> None:
        assert self.exchange is not None
        if not self.exchange.status:
            await self.exchange.read_headers()
        self.status = self.exchange.status
        body = await self.exchange.json()
        if self.status != 200:
            self.reply.error = body["error"]
            return
        if self.kind == "json-responses":
            self._take_response(body)
            return
        choice = body.get("choices", [body])[0]
        self.reply.add(choice["message"]["content"] if "message" in choice else choice["text"])
        self.reply.finish, self.reply.done = choice["finish_reason"], True

    def _take_response(self, response: dict[str, Any]) -> None:
        """The last state of a response, alone or in the last event."""
        self.reply.error = response["error"]
        self.reply.finish = (response["incomplete_details"] or {}).get("reason", response["status"])
        self.reply.done = response["status"] in ("completed", "incomplete")
        if self.whole and self.reply.done:
            self.reply.add(response["output"][0]["content"][0]["text"])

    async def _read_events(self) -> None:
        assert self.exchange is not None
        if not self.exchange.status:
            await self.exchange.read_headers()
        self.status = self.exchange.status
        if self.status != 200:
            self.reply.error = (await self.exchange.json())["error"]
            return
        self.id = self.id or self.exchange.headers["x-sluice-request"]
        async for data in self.exchange.events():
            assert not self.reply.done, "an event after [DONE]"
            self.reply.events.append(data)
            if data == "[DONE]":
                self.reply.done = True
                continue
            event = json.loads(data)
            if "error" in event:
                self.reply.error = event["error"]
                continue
            if self.kind == "sse-responses":
                if event["type"] == "response.output_text.delta":
                    self.reply.add(event["delta"])
                elif "response" in event and event["response"]["status"] != "in_progress":
                    self._take_response(event["response"])
                continue
            for choice in event.get("choices", [event]):
                text = choice.get("text", choice.get("delta", {}).get("content"))
                if text:
                    self.reply.add(text)
                self.reply.finish = choice.get("finish_reason") or self.reply.finish

    async def pieces(self, count: int, timeout: float = 30.0) -> None:
        """Until so many pieces have come."""
        self.reading()
        await eventually(lambda: len(self.reply.pieces) >= count, timeout, what=f"{count} pieces")

    async def stop_reading(self) -> None:
        """Read no more, and stay connected."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def leave(self) -> None:
        """Vanish: reset the connection and read no more."""
        await self.stop_reading()
        if self.socket is not None:
            self.socket.transport.abort()
        if self.exchange is not None:
            self.exchange.abort()


async def undisturbed(rig: Rig, server: Server, tokens: int, prompt: str) -> str:
    """The text that a run without any fault gives."""
    call = await Call.begin(rig, server, "sse-generate", tokens, prompt=prompt)
    reply = await call.finish()
    assert reply.done
    return reply.text
