"""One question on every way of asking: endpoint by endpoint, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.asyncio.client import connect

from tests.apps.api.live import Site, events

CHAT, COMPLETIONS, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"
PATHS = (CHAT, COMPLETIONS, RESPONSES, GENERATE)
WAYS = (*(f"{path} {mode}" for path in PATHS for mode in ("stream", "json")), "websocket")
STREAMS = (*(f"{path} stream" for path in PATHS), "websocket")


@dataclass
class Answer:
    """What came back, in one form for all.

    Attributes:
        status: of HTTP, or the one in the socket's error message; 200 otherwise.
        deltas: texts as they were sent; one for a whole answer.
        error: the error object.
    """

    status: int
    deltas: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    stop_reason: Any = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    raw: str = ""

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def tokens(self) -> int:
        usage = self.usage or {}
        return int(usage.get("completion_tokens", usage.get("output_tokens", -1)))

    @property
    def prompt_tokens(self) -> int:
        usage = self.usage or {}
        return int(usage.get("prompt_tokens", usage.get("input_tokens", -1)))


def body(way: str, text: str, **fields: Any) -> dict[str, Any]:
    """The question in an endpoint's words: ``max_tokens`` by its name there, fields that are ``...`` left out."""
    path, _, mode = way.partition(" ")
    out: dict[str, Any] = {"model": "demo", "temperature": 0, **fields}
    if path == CHAT:
        out.setdefault("messages", [{"role": "user", "content": text}])
        if mode == "stream":
            out.setdefault("stream_options", {"include_usage": True})
    elif path == RESPONSES:
        out.setdefault("input", text)
        if "max_tokens" in out:
            out["max_output_tokens"] = out.pop("max_tokens")
    else:
        out.setdefault("prompt", text)
        if path == COMPLETIONS and mode == "stream":
            out.setdefault("stream_options", {"include_usage": True})
    if path != "websocket":
        out.setdefault("stream", mode == "stream")
    return {name: value for name, value in out.items() if value is not ...}


async def ask(site: Site, way: str, text: str = "hi", **fields: Any) -> Answer:
    """Ask, and read to the end."""
    asked = body(way, text, **fields)
    if way == "websocket":
        return await _socket(site, asked)
    async with site.client() as client:
        reply = await client.post(way.partition(" ")[0], json=asked)
    return read(way, reply)


def read(way: str, reply: httpx.Response) -> Answer:
    """A finished HTTP answer."""
    out = Answer(reply.status_code, headers=reply.headers, raw=reply.text)
    if not reply.headers["content-type"].startswith("text/event-stream"):
        whole = reply.json()
        out.error = whole.get("error") if reply.status_code != 200 else None
        if out.error is None:
            _whole(out, whole)
        return out
    for data in events(reply.text):
        if data != "[DONE]":
            _event(out, json.loads(data))
    return out


def _whole(out: Answer, whole: dict[str, Any]) -> None:
    out.usage = whole["usage"]
    if "output" in whole:
        out.deltas = [part["text"] for item in whole["output"] for part in item.get("content", ())]
        out.finish = [_finish(whole)]
        return
    for choice in whole.get("choices", [whole]):
        out.deltas.append((choice["message"]["content"] if "message" in choice else choice["text"]) or "")
        out.finish.append(choice["finish_reason"])
        out.stop_reason = choice.get("stop_reason")


def _event(out: Answer, event: dict[str, Any]) -> None:
    if "error" in event and "response" not in event:
        out.error = event["error"]
        return
    if "type" in event:
        if event["type"] == "response.output_text.delta":
            out.deltas.append(event["delta"])
        elif event["type"] in ("response.completed", "response.incomplete"):
            out.usage = event["response"]["usage"]
            out.finish.append(_finish(event["response"]))
        elif event["type"] == "response.failed":
            out.error = event["response"]["error"]
        return
    out.usage = event.get("usage") or out.usage
    for choice in event.get("choices", [event]):
        out.deltas.append((choice["delta"].get("content") if "delta" in choice else choice["text"]) or "")
        if choice["finish_reason"]:
            out.finish.append(choice["finish_reason"])
            out.stop_reason = choice.get("stop_reason")


def _finish(response: dict[str, Any]) -> str:
    return "stop" if response["status"] == "completed" else "length"


async def _socket(site: Site, asked: dict[str, Any]) -> Answer:
    headers = {"Authorization": f"Bearer {site.key}"}
    out = Answer(200)
    async with connect(f"ws://{site.host}/ws/v1/stream", additional_headers=headers) as socket, asyncio.timeout(60):
        await socket.send(json.dumps({"type": "generate", "id": "a", **asked}))
        async for raw in socket:
            message = json.loads(raw)
            out.raw += str(raw) + "\n"
            if message["type"] == "delta":
                out.deltas.append(message["text"])
            elif message["type"] == "error":
                out.status, out.error = message["status"], message["error"]
                return out
            elif message["type"] == "done":
                out.usage, out.stop_reason = message["usage"], message["stop_reason"]
                out.finish.append(message["finish_reason"])
                return out
    raise AssertionError("the socket closed before the end")
