"""What the streaming benchmark compares with: the same OpenAI-shaped chunks from a loop in the server itself.

None of these does anything but stream: no queue, no worker, no Redis, no cancellation, no validation.
Each is an ASGI application of ``POST /v1/chat/completions``; the number of tokens and the pace come from
the body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

HEAD = b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m",'
WORD = b" word"
"""The text of every token."""
CHUNK = HEAD + b'"choices":[{"index":0,"delta":{"content":"' + WORD + b'"},"logprobs":null,"finish_reason":null}]}\n\n'
END = HEAD + b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


async def tokens(count: int, rate: float) -> AsyncIterator[bytes]:
    """One chunk per token, at ``rate`` tokens per second (0: as fast as it goes)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(count):
        wait = began + number / rate - loop.time() if rate else 0.0
        await asyncio.sleep(max(0.0, wait))
        yield CHUNK
    yield END


async def _body(receive: Any) -> dict[str, Any]:
    data, more = b"", True
    while more:
        message = await receive()
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return dict(json.loads(data))


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application without any framework."""
    if scope["type"] != "http":
        return
    body = await _body(receive)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    async for chunk in tokens(body["max_tokens"], body.get("rate", 0.0)):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def channels_app() -> Any:
    """A plain Channels consumer, as its documentation shows it."""
    from channels.generic.http import AsyncHttpConsumer
    from django.conf import settings

    if not settings.configured:
        settings.configure()

    class Plain(AsyncHttpConsumer):
        async def handle(self, body: bytes) -> None:
            wanted = json.loads(body)
            await self.send_headers(headers=[(b"Content-Type", b"text/event-stream")])
            async for chunk in tokens(wanted["max_tokens"], wanted.get("rate", 0.0)):
                await self.send_body(chunk, more_body=True)
            await self.send_body(b"")

    return Plain.as_asgi()


def fastapi_app() -> Any:
    """FastAPI's streaming response."""
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse

    app = FastAPI()

    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(tokens(body["max_tokens"], body.get("rate", 0.0)), media_type="text/event-stream")

    # FastAPI resolves the route's annotations against module globals, where Request is not.
    complete.__annotations__["request"] = Request
    app.post("/v1/chat/completions", response_model=None)(complete)
    return app


def __getattr__(name: str) -> Any:
    if name == "channels":
        return channels_app()
    if name == "fastapi":
        return fastapi_app()
    raise AttributeError(name)
