"""A small server that speaks as much of the OpenAI protocol as an engine needs.

What it does is asked for in the prompt: ``[status 500]``, ``[break 3]``, ``[garbage 3]``,
``[error 3]``, ``[cut 3]``, ``[tools]``, ``[slow]``, ``[separator]``; otherwise it streams words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

_MARK = re.compile(r"\[(\w+)(?: (\d+))?\]")


class Upstream:
    """``async with Upstream() as upstream``: listens on a free port of the loopback.

    Attributes:
        bodies: what was posted, parsed, with ``path`` and ``key`` added.
        streaming: answers being streamed now.
        broken_off: answers whose client went away before their end.
    """

    def __init__(self, *, context: int = 4096, name: str = "words") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.streaming = 0
        self.broken_off = 0
        self.context = context
        self.name = name
        self.models_status = 200
        self.changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait(self, condition: Any, limit: float = 10.0) -> None:
        async with asyncio.timeout(limit):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, _ = head.split(" ", 2)
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            models = {"data": [{"id": self.name, "max_model_len": self.context}]}
            self._plain(writer, self.models_status, models)
            return
        parsed = {**json.loads(body), "path": path, "key": headers.get("authorization")}
        self.bodies.append(parsed)
        prompt = str(parsed.get("prompt") or parsed["messages"][-1]["content"])
        marks = {name: int(value or 0) for name, value in _MARK.findall(prompt)}
        if "status" in marks:
            error = {"error": {"message": prompt, "code": "context_length_exceeded"}}
            self._plain(writer, marks["status"], error)
            return
        self.streaming += 1
        self.changed.set()
        gone = asyncio.ensure_future(reader.read(1))
        answer = asyncio.ensure_future(self._stream(writer, parsed, prompt, marks))
        try:
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.broken_off += 1
        finally:
            answer.cancel()
            gone.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
            self.streaming -= 1
            self.changed.set()
        # One answer a connection keeps this server simple.
        raise ConnectionError

    def _plain(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n".encode())
        writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], prompt: str, marks: dict[str, int]
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chat = "messages" in body
        most = body.get("max_tokens") or 16

        def chunk(text: str | None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
            told = {"delta": {"content": text, **delta}} if chat else {"text": text or ""}
            return {"choices": [{"index": 0, "finish_reason": finish, **told}]}

        if chat:
            await self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        if "tools" in marks:
            for part in ({"name": "look", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ": 1}"}):
                await self._event(writer, chunk(None, tool_calls=[{"index": 0, "function": part}]))
            await self._event(writer, chunk(None, "tool_calls"))
            await self._end(writer, 9)
            return
        count = 0
        for word in self.words(prompt, most):
            if (
                marks.get("break") == count
                or marks.get("garbage") == count
                or marks.get("error") == count
                or marks.get("cut") == count
            ):
                if "garbage" in marks:
                    await self._raw(writer, b"data: <html>\n\n")
                elif "error" in marks:
                    await self._event(writer, {"error": {"message": prompt}})
                writer.transport.abort() if "break" in marks else await self._raw(writer, b"")
                return
            await self._event(writer, chunk(word if "separator" not in marks else f"{word}\u2028\x85x"))
            count += 1
            if "slow" in marks and count == 2:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        ended = len(self.words(prompt, 1 << 30)) <= most
        await self._event(writer, chunk(None, "stop" if ended and not body.get("ignore_eos") else "length"))
        await self._end(writer, count)

    def words(self, prompt: str, most: int) -> list[str]:
        """The whole answer to a prompt, cut at ``most`` words."""
        return [f" {prompt[:4]}-{number}" for number in range(min(most, 40))]

    async def _end(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        usage = {"completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 3}}
        await self._event(writer, {"choices": [], "usage": usage})
        await self._raw(writer, b"data: [DONE]\n\n")
        await self._raw(writer, b"")

    async def _event(self, writer: asyncio.StreamWriter, content: Any) -> None:
        # Cut in two, so that events do not arrive in one piece; JSON unescaped, as many servers send it.
        data = f"data: {json.dumps(content, ensure_ascii=False)}\r\n\r\n".encode()
        await self._raw(writer, data[:9])
        await self._raw(writer, data[9:])

    async def _raw(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
