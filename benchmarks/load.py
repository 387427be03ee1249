"""The client of the streaming benchmark, in a process of its own: ``python -m benchmarks.load``.

Reads many streams on raw sockets with as little work per byte as Python allows, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any


class Reader(asyncio.Protocol):
    """One stream: counts events, notes when they came."""

    def __init__(self, request: bytes, timed: bool) -> None:
        self.request = request
        self.timed = timed
        self.events = 0
        self.bytes = 0
        self.arrivals: list[tuple[float, int]] = []
        self.first = 0.0
        self.ok = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        count = data.count(b'"finish_reason":null')
        self.bytes += len(data)
        if count:
            now = time.perf_counter()
            self.first = self.first or now
            self.events += count
            if self.timed:
                self.arrivals.append((now, self.events))
        if b"[DONE]" in data:
            self.ok = True
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def latencies(reader: Reader, interval: float) -> list[float]:
    """How late each token was against the pace, seconds; the earliest token defines the pace."""
    offsets = [now - number * interval for now, number in reader.arrivals]
    base = min(offsets)
    return [o - base for o in offsets]


async def run(args: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    body = {"model": args.model, "messages": [{"role": "user", "content": "hi"}], "stream": True,
            "max_tokens": args.tokens, **json.loads(args.extra)}  # fmt: skip
    payload = json.dumps(body).encode()
    head = (
        f"POST {args.path} HTTP/1.1\r\nHost: 127.0.0.1:{args.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\nAuthorization: Bearer {args.key}\r\n\r\n"
    ).encode()
    readers = []
    began = time.perf_counter()
    for number in range(args.streams):
        _, reader = await loop.create_connection(
            lambda: Reader(head + payload, args.interval > 0), "127.0.0.1", args.port
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
        "tokens": (args.streams - failed) * args.tokens,
        "seconds": ended - min((r.first for r in readers if r.first), default=began),
        "bytes": sum(r.bytes for r in readers),
        "events": sum(r.events for r in readers),
    }
    if args.interval:
        late = sorted(x for r in readers if r.arrivals for x in latencies(r, args.interval))
        out["late_p50_ms"] = statistics.median(late) * 1000
        out["late_p99_ms"] = late[int(len(late) * 0.99)] * 1000
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
    parser.add_argument("--interval", type=float, default=0.0, help="seconds per token of a paced run")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
