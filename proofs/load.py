"""Steady load through a load balancer, and the judgement of every answer.

The scripted model's answer to a prompt is known before anything is disturbed, so that
each answer is either exactly that text, or *failed* (it was told so, or never began),
*truncated* (it stopped without a word), *duplicated* (a part came twice) or *wrong*.
Clients do not repeat a request that failed: what they lose counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

VERDICTS = ("ok", "failed", "truncated", "duplicated", "wrong")
#: A stream with no news for so long is given up, seconds.
PATIENCE = 45.0


@dataclass
class Answer:
    """What a client has seen of one answer; times by its monotonic clock, seconds.

    Attributes:
        kind: how it was asked for: ``sse``, ``json``, ``ws``, ``ws-kept`` (many requests over one socket) or
            ``resumable`` (read on elsewhere where its stream breaks).
        error: what the client was told, or how the connection ended; empty where nothing went wrong.
        told: the error came in band, as a status, an event or a close code, not as silence.
        disorder: a sequence number came twice or backwards.
        wait: the longest time without news, the wait for the first piece included.
        moves: how often it was read on elsewhere.
    """

    kind: str
    prompt: str
    tokens: int
    began: float = field(default_factory=time.monotonic)
    id: str = ""
    text: str = ""
    done: bool = False
    error: str = ""
    told: bool = False
    disorder: bool = False
    wait: float = 0.0
    ended: float = 0.0
    moves: int = 0
    seen: int = 0
    _last: float = 0.0

    def news(self, text: str, number: int = 0) -> None:
        """A piece has come; ``number`` is its place in the answer where the transport tells it."""
        now = time.monotonic()
        self.wait = max(self.wait, now - (self._last or self.began))
        self._last = now
        if number:
            self.disorder |= number <= self.seen
            self.seen = number
        self.text += text

    def end(self, error: str = "", *, told: bool = False) -> None:
        if not self.ended:
            self.ended = time.monotonic()
            self.wait = max(self.wait, self.ended - (self._last or self.began))
        if error and not self.error:
            self.error, self.told = error, told


def judge(answer: Answer, expected: str) -> str:
    """One of :data:`VERDICTS`."""
    if answer.disorder:
        return "duplicated"
    if not expected.startswith(answer.text):
        return "duplicated" if _repeats(answer.text, expected) else "wrong"
    if answer.done and answer.text == expected:
        return "ok"
    if answer.done or (answer.text and not answer.told):
        return "truncated"
    return "failed"


def _repeats(text: str, expected: str) -> bool:
    """Whether ``text`` goes on, where the two part, with what was said before; less than a few letters tell nothing."""
    same = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(expected))
    rest = text[same:]
    return len(rest) > 3 and any(expected.startswith(rest, same - back) for back in range(1, same + 1))


class Client:
    """Asks through one address. A fresh connection per request, or kept ones where ``keep``."""

    def __init__(self, base: str, key: str, *, model: str = "scripted", reattach: float = 30.0) -> None:
        self.base = base
        self.model = model
        self.reattach = reattach
        self.headers = {"Authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(PATIENCE, connect=10.0)
        self.fresh = httpx.AsyncClient(
            base_url=base, headers={**self.headers, "Connection": "close"}, timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )  # fmt: skip
        self.kept = httpx.AsyncClient(base_url=base, headers=self.headers, timeout=timeout)
        self.reconnects = 0

    async def aclose(self) -> None:
        await self.fresh.aclose()
        await self.kept.aclose()

    def _body(self, answer: Answer, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model, "max_tokens": answer.tokens, "ignore_eos": True, "temperature": 0,
            **({"messages": [{"role": "user", "content": answer.prompt}]} if answer.kind in ("sse", "json")
               else {"prompt": answer.prompt}), **more,
        }  # fmt: skip

    async def ask(self, answer: Answer, socket: ClientConnection | None = None) -> Answer:
        """Send a request and read its answer to whatever end it takes."""
        try:
            async with asyncio.timeout(PATIENCE * 3):
                if answer.kind == "json":
                    await self._json(answer)
                elif answer.kind == "sse":
                    await self._sse(answer)
                elif answer.kind == "resumable":
                    await self._resumable(answer)
                elif answer.kind == "ws":
                    async with self.socket() as opened:
                        await self._ws(answer, opened)
                else:
                    assert socket is not None
                    await self._ws(answer, socket)
        except InvalidHandshake as exc:
            answer.end(f"handshake: {exc}", told=True)
        except (httpx.HTTPError, OSError, TimeoutError, ConnectionClosed) as exc:
            answer.end(f"connection: {type(exc).__name__} {exc}".strip())
        answer.end("" if answer.done else "ended without a word")
        return answer

    async def _json(self, answer: Answer) -> None:
        reply = await self.kept.post("/v1/chat/completions", json=self._body(answer))
        answer.id = reply.headers.get("x-sluice-request", "")
        if reply.status_code != 200:
            answer.end(f"status {reply.status_code}: {_code(reply.text)}", told=True)
            return
        answer.news(reply.json()["choices"][0]["message"]["content"])
        answer.done = True

    async def _sse(self, answer: Answer) -> None:
        body = self._body(answer, stream=True)
        async with self.fresh.stream("POST", "/v1/chat/completions", json=body) as reply:
            await self._events(answer, reply)

    async def _resumable(self, answer: Answer) -> None:
        """Read on after every break, for at most ``reattach`` seconds without success."""
        request: tuple[str, str, Any, dict[str, str]] = ("POST", "/generate", self._body(
            answer, stream=True, resumable=True), {})  # fmt: skip
        broken = 0.0
        while True:
            error = ""
            try:
                method, path, body, headers = request
                async with self.fresh.stream(method, path, json=body, headers=headers) as reply:
                    if answer.moves and reply.status_code == 503:
                        error = "status 503"
                    else:
                        before = answer.seen
                        await self._events(answer, reply, leave_errors=bool(answer.id))
                        broken = 0.0 if answer.seen > before else broken
                        error = "" if answer.done or answer.error else "broken"
            except (httpx.HTTPError, OSError) as exc:
                error = f"{type(exc).__name__}"
            if not error:
                return
            now = time.monotonic()
            broken = broken or now
            if not answer.id or now - broken > self.reattach:
                answer.end(f"{error}, and it could not be read on", told=not answer.text)
                return
            answer.moves += 1
            request = ("GET", f"/v1/requests/{answer.id}/events", None, {"Last-Event-ID": str(answer.seen)})
            await asyncio.sleep(0.25)

    async def _events(self, answer: Answer, reply: httpx.Response, *, leave_errors: bool = False) -> None:
        if reply.status_code != 200:
            answer.end(f"status {reply.status_code}: {_code((await reply.aread()).decode())}", told=True)
            return
        answer.id = answer.id or reply.headers.get("x-sluice-request", "")
        async for number, data in _parse(reply.aiter_bytes()):
            if data == "[DONE]":
                answer.done = True
                continue
            event = json.loads(data)
            if "error" in event:
                code = event["error"].get("code")
                if answer.kind == "resumable" and code in ("detached", "shutting_down"):
                    return  # read on elsewhere
                answer.end(f"event: {code}", told=True)
                return
            for choice in event.get("choices", [event]):
                text = choice.get("text", choice.get("delta", {}).get("content"))
                if text or number:
                    answer.news(text or "", number)

    def socket(self) -> connect:
        return connect(
            self.base.replace("http", "ws") + "/ws/v1/stream", additional_headers=self.headers,
            subprotocols=["sluice.v1"], open_timeout=10, ping_interval=None,
        )  # type: ignore[list-item]  # fmt: skip

    async def _ws(self, answer: Answer, socket: ClientConnection) -> None:
        await socket.send(json.dumps({"type": "generate", "id": "a", **self._body(answer)}))
        while True:
            try:
                async with asyncio.timeout(PATIENCE):
                    message = json.loads(await socket.recv())
            except ConnectionClosed as exc:
                code = exc.rcvd.code if exc.rcvd else None
                answer.end(f"closed: {code}", told=code is not None)
                raise
            match message["type"]:
                case "accepted":
                    answer.id = message["request_id"]
                case "delta":
                    answer.news(message["text"], message["seq"])
                case "done":
                    answer.done = message["finish_reason"] == "length"
                    answer.end("" if answer.done else f"done: {message['finish_reason']}", told=True)
                    return
                case "error":
                    answer.end(f"message: {message['error'].get('code')}", told=True)
                    return


async def _parse(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, str]]:
    """(id or 0, data) of each server-sent event; comments are left out."""
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        while b"\n\n" in buffer:
            event, _, buffer = buffer.partition(b"\n\n")
            lines = event.decode().split("\n")
            number = next((int(x[4:]) for x in lines if x.startswith("id: ") and x[4:].isdigit()), 0)
            data = [x[6:] for x in lines if x.startswith("data: ")]
            if data:
                yield number, "\n".join(data)


def _code(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return text[:80]


class Load:
    """Clients that ask one request after the other until they are told to stop.

    Args:
        base: address of the load balancer.
        kinds: one client for each entry; repeat a kind for more of it.
        prompts: (prompt, tokens) pairs that the clients take in turn.
    """

    def __init__(self, base: str, key: str, kinds: Iterable[str], prompts: list[tuple[str, int]]) -> None:
        self.client = Client(base, key)
        self.kinds = list(kinds)
        self.prompts = prompts
        self.answers: list[Answer] = []
        self.expected: dict[tuple[str, str, int], str] = {}
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """Ask everything once while all is well: what the answers have to be.

        Raises:
            SystemExit: an answer does not come, or two ways to ask differ.
        """
        kinds = sorted(set(self.kinds) | {"json", "ws"})
        asked = [Answer("ws" if k == "ws-kept" else k, p, n) for p, n in self.prompts for k in kinds]
        await asyncio.gather(*map(self.client.ask, asked))
        for kind, answer in zip(kinds * len(self.prompts), asked, strict=True):
            if not answer.done or not answer.text:
                raise SystemExit(f"an undisturbed request failed ({kind}): {answer.error}")
            self.expected[kind, answer.prompt, answer.tokens] = answer.text
        for prompt, tokens in self.prompts:
            for family in (("json", "sse"), ("ws", "ws-kept", "resumable")):
                if len({self.expected[k, prompt, tokens] for k in family if k in kinds}) != 1:
                    raise SystemExit(f"undisturbed answers differ between {', '.join(family)}")

    def start(self) -> None:
        self._stop.clear()
        self._tasks = [asyncio.create_task(self._client(i, kind)) for i, kind in enumerate(self.kinds)]

    async def stop(self) -> None:
        """Let every client end the request it has; then none is open."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        self._tasks = []

    def verdict(self, answer: Answer) -> str:
        return judge(answer, self.expected[answer.kind, answer.prompt, answer.tokens])

    def tally(self, answers: Iterable[Answer] | None = None) -> Counter[str]:
        """How many answers have which verdict."""
        return Counter(map(self.verdict, self.answers if answers is None else answers))

    async def _client(self, place: int, kind: str) -> None:
        turn = place
        socket: ClientConnection | None = None
        while not self._stop.is_set():
            prompt, tokens = self.prompts[turn % len(self.prompts)]
            turn += 1
            if kind == "ws-kept":
                socket = await self._connected(socket)
            answer = Answer(kind, prompt, tokens)
            await self.client.ask(answer, socket)
            if kind == "ws-kept" and socket is not None and answer.error == "closed: 1012" and not answer.id:
                # Closed while the request was on its way: the client knows that nobody has taken it.
                self.client.reconnects += 1
                continue
            self.answers.append(answer)
            if not answer.done:  # a client that failed does not hammer
                await asyncio.sleep(0.2)
        if socket is not None:
            await socket.close()

    async def _connected(self, socket: ClientConnection | None) -> ClientConnection | None:
        """The kept socket; a new one where the old one was closed between two requests."""
        if socket is not None and socket.state.name == "OPEN":
            return socket
        if socket is not None:
            self.client.reconnects += 1
        for _ in range(20):
            try:
                return await self.client.socket()
            except (InvalidHandshake, OSError, TimeoutError):
                await asyncio.sleep(0.2)
        return None
