"""The client of the streaming benchmark, in a process of its own: ``python -m benchmarks.load``.

Reads many streams on raw sockets with as little work per byte as Python allows, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import statistics
import time
from typing import Any

# An event with text in it, whatever spaces a server's JSON has; the role comes with none.
_TEXT = re.compile(rb'"(?:content|text)": ?"[^"]')
# The texts of events, where their length says how many tokens they hold.
_TEXTS = re.compile(rb'"(?:content|text)":"([^"]*)"')
SETTLE = 0.5
"""Seconds after the last stream's first token from which on latencies count."""
# Some servers end a stream without [DONE].
_FINISHED = re.compile(rb'"finish_reason": ?"')
EDGE = 24
"""Bytes kept of a read for what goes on in the next; more than the longest mark has."""
_SHARED = " ".join(f"Rule {n}: an answer of kind {n} names its source and its date." for n in range(1, 36))
_LONG = " ".join(f"On day {n} the observatory noted {n * 7919 % 1000} meteors over the valley." for n in range(1, 86))


class Reader(asyncio.Protocol):
    """One stream: counts events, notes when they came.

    Args:
        width: bytes of text per token, where tokens are counted and not events: a server that is behind
            writes several tokens in one event, and their pace is what is measured.
    """

    def __init__(self, request: bytes, timed: bool, counts: bool, greeting: bytes = b"", width: int = 0) -> None:
        self.width = width
        self.request = request
        self.ws = bool(greeting)
        self.greeting = greeting
        self.counts = counts
        self.mark = b'"type":"delta"' if greeting else b'"finish_reason":null'
        self.timed = timed
        self.sent = 0.0
        self.events = 0
        self.bytes = 0
        self.tail = b""
        self.rest = b""
        self.arrivals: list[tuple[float, int]] = []
        self.first = 0.0
        self.ok = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.sent = time.perf_counter()
        transport.write(self.greeting or self.request)

    def data_received(self, data: bytes) -> None:
        if self.greeting:
            # The handshake's answer; what follows it comes only after the request.
            self.greeting = b""
            self.transport.write(self.request)
            return
        count = self._count(data)
        self.bytes += len(data)
        if count:
            now = time.perf_counter()
            self.first = self.first or now
            self.events += count
            if self.timed:
                self.arrivals.append((now, self.events))
        # What a read cuts in two still ends the stream.
        edge = self.tail + data[:EDGE]
        self.tail = (self.tail + data)[-EDGE:] if len(data) < EDGE else data[-EDGE:]
        if self.counts and (_FINISHED.search(data) or _FINISHED.search(edge)):
            self.ok = True
        if any(mark in part for mark in (b"[DONE]", b'"type":"done"') for part in (data, edge)):
            self.ok = True
            self.transport.close()
        elif self.ws and b'"type":"error"' in data:
            self.transport.close()

    def _count(self, data: bytes) -> int:
        if self.width:
            data = self.rest + data
            texts = list(_TEXTS.finditer(data))
            # What two reads share is counted with the second.
            self.rest = data[texts[-1].end() if texts else 0 :]
            return sum(len(text[1]) for text in texts) // self.width
        return len(_TEXT.findall(data)) if self.counts else data.count(self.mark)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def latencies(reader: Reader, interval: float, since: float) -> list[float]:
    """How late each token after ``since`` was against the pace, seconds; the earliest of them defines the pace."""
    offsets = [now - number * interval for now, number in reader.arrivals if now >= since]
    base = min(offsets, default=0.0)
    return [o - base for o in offsets]


def prompt(args: argparse.Namespace, number: int) -> str:
    """What one stream asks; ``shared`` has 600 tokens in common, ``long`` 2,000 in every fourth."""
    if args.mix == "ask":
        return str(args.ask)
    if args.prompt_bytes:
        return "x" * args.prompt_bytes
    ask = f"Write a long story, number {args.salt + number}, about a river and the town beside it."
    if args.mix == "shared":
        return f"{_SHARED} {ask}"
    if args.mix == "long" and number % 4 == 0:
        return f"Report {args.salt + number}. {_LONG} {ask}"
    return ask


def post(port: int, key: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    """A request on a connection of its own, as bytes."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\r\n"
    ).encode()
    return head + payload


def handshake(port: int, key: str) -> bytes:
    """What a WebSocket begins with."""
    return (
        f"GET /ws/v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Protocol: sluice.v1\r\nAuthorization: Bearer {key}\r\n\r\n"
    ).encode()


def text_frame(message: dict[str, Any]) -> bytes:
    """A message on a WebSocket, of less than 64 KiB (with a mask of zeros)."""
    payload = json.dumps(message).encode()
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return b"\x81" + length + bytes(4) + payload


def requests(args: argparse.Namespace, number: int) -> tuple[bytes, bytes]:
    """What one stream sends: the handshake of a WebSocket or nothing, and its request."""
    common = {"model": args.model, "max_tokens": args.tokens, **json.loads(args.extra)}
    if args.ws:
        ask = {"type": "generate", "id": "1", "prompt": args.ask, **common}
        return handshake(args.port, args.key), text_frame(ask)
    chat = {"messages": [{"role": "user", "content": prompt(args, number)}], "stream": True, **common}
    return b"", post(args.port, args.key, chat, args.path)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    readers = []
    timed = args.interval > 0 or args.timed
    began = time.perf_counter()
    for number in range(args.streams):
        greeting, request = requests(args, number)
        _, reader = await loop.create_connection(
            lambda request=request, greeting=greeting: Reader(request, timed, args.timed, greeting, args.width),
            "127.0.0.1",
            args.port,
        )
        readers.append(reader)
        if args.interval and number % 16 == 15:
            await asyncio.sleep(0.01)  # spread over the pace, as real streams are
    await asyncio.gather(*(r.done for r in readers))
    ended = time.perf_counter()
    failed = sum(not r.ok for r in readers)
    out: dict[str, Any] = {
        "streams": args.streams,
        "failed": failed,
        "tokens": sum(r.events for r in readers) if args.timed else (args.streams - failed) * args.tokens,
        "seconds": ended - min((r.first for r in readers if r.first), default=began),
        "bytes": sum(r.bytes for r in readers),
        "events": sum(r.events for r in readers),
    }
    if args.timed:
        out["seconds"] = ended - began
        waits = [r.first - r.sent for r in readers if r.first]
        gaps = sorted(b[0] - a[0] for r in readers for a, b in zip(r.arrivals, r.arrivals[1:], strict=False))
        out["ttft_p50_ms"] = statistics.median(waits) * 1000
        out["itl_p50_ms"] = statistics.median(gaps) * 1000 if gaps else 0.0
        out["itl_p99_ms"] = gaps[int(len(gaps) * 0.99)] * 1000 if gaps else 0.0
    if args.interval:
        # Once all streams run: before that, what is measured is how fast so many are accepted.
        since = max((r.first for r in readers if r.first), default=0.0) + SETTLE
        late = sorted(x for r in readers for x in latencies(r, args.interval, since))
        if late:
            out["late_p50_ms"] = statistics.median(late) * 1000
            out["late_p99_ms"] = late[int(len(late) * 0.99)] * 1000
            out["accepted_s"] = since - SETTLE - began
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--model", default="m")
    parser.add_argument("--key", default="none")
    parser.add_argument("--extra", default="{}")
    parser.add_argument("--ws", action="store_true", help="a WebSocket per stream instead of a POST")
    parser.add_argument("--ask", default="hi", help="what every stream asks with --mix ask")
    parser.add_argument("--mix", default="ask", choices=["ask", "plain", "shared", "long"], help="what is asked")
    parser.add_argument("--width", type=int, default=0, help="bytes of text per token, where events may hold several")
    parser.add_argument("--prompt-bytes", type=int, default=0, help="a prompt of this length, with --mix plain")
    parser.add_argument("--salt", type=int, default=0, help="makes prompts differ from those of other runs")
    parser.add_argument("--timed", action="store_true", help="times of tokens too; tokens are counted, not assumed")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds per token of a paced run")
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(json.dumps(asyncio.run(run(args))))


if __name__ == "__main__":
    main()
