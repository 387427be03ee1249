"""What clients that never read cost the server and everybody else.

    python -m benchmarks.slow_readers [--cycles 3] [--clients 20] [--tokens 5000]

Each cycle has three phases, so that drift of the machine falls on all alike: observers alone; observers beside
clients that read long answers; observers beside clients (half SSE, half WebSocket) that ask for the same and
never read a byte. The scripted engine makes the same tokens in the last two, so that their ratio shows what
*not reading* costs. The server is pinned to one processor, everything else to the other. Exit status 1
where a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import handshake, post, text_frame
from benchmarks.processes import machine
from benchmarks.site import Site, site

OBSERVERS, OBSERVED_RATE, LONG_RATE = 16, 50, 200
SEND_TIMEOUT = 30
MODELS = (
    f"observed=scripted:rate={OBSERVED_RATE},slots=64,context=20000,say=1 "
    f"long=scripted:rate={LONG_RATE},slots=64,context=20000"
)
#: The bounds: MiB of server memory per client that does not read, and growth of the observers' p99.
MAX_MIB, MAX_GROWTH = 1.0, 1.10
ALONE_SECONDS = 10.0
#: What a client's kernel takes in although nobody reads it. Small: with a large one, most of an answer on the
#: WebSocket (some 54 bytes per token) would lie in the two kernels, and nobody would have to wait.
RECEIVE_BUFFER = 4096


def request(site: Site, model: str, tokens: int, content: str = "hi") -> bytes:
    """A chat request with a stream, as bytes."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": tokens,
            "ignore_eos": True}  # fmt: skip
    return post(site.port, site.key, body)


class Reader(asyncio.Protocol):
    """Reads a stream and notes the time between its tokens."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.gaps: list[float] = []
        self.whole = False
        self._last = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        self.whole = self.whole or b"data: [DONE]" in data
        count = data.count(b'"finish_reason":null')
        if not count:
            return
        now = time.perf_counter()
        if self._last:
            # Of events that came together, the first has waited and the others have not.
            self.gaps += [now - self._last] + [0.0] * (count - 1)
        self._last = now

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def observe(site: Site, seconds: float) -> list[float]:
    """Inter-token times of streams of somebody who reads, seconds."""
    loop = asyncio.get_running_loop()
    tokens = int(seconds * OBSERVED_RATE)
    readers = []
    for _ in range(OBSERVERS):
        # Text of one byte per token: each token is an event, and none waits for the rest of a character.
        data = request(site, "observed", tokens, f"[[say:{'a' * tokens}]]")
        _, reader = await loop.create_connection(lambda data=data: Reader(data), "127.0.0.1", site.port)
        readers.append(reader)
    await asyncio.gather(*(r.done for r in readers))
    if not all(r.whole for r in readers):
        raise SystemExit("an observed stream did not come whole")
    return [gap for r in readers for gap in r.gaps]


def cuts(site: Site) -> list[int]:
    """Connections cut so far: because nobody read, and because nobody answered a ping."""
    return [int(site.metric(f"sluice_{name}_total")) for name in ("slow_clients", "dead_peers")]


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def never_reads(site: Site, kind: str, tokens: int) -> socket.socket:
    """A client that asks for a long answer and reads none of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    sock.connect(("127.0.0.1", site.port))
    if kind == "sse":
        sock.sendall(request(site, "long", tokens))
        return sock
    sock.sendall(handshake(site.port, site.key))
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(1)
    ask = {"type": "generate", "id": "a", "model": "long", "prompt": "hi", "max_tokens": tokens, "ignore_eos": True}
    sock.sendall(text_frame(ask))
    return sock


@dataclass
class Cycle:
    """One round of the three phases."""

    alone: float = 0.0
    reading: float = 0.0
    not_reading: float = 0.0
    mib_each: float = 0.0
    cut: int = 0
    unanswered: int = 0
    cut_after: list[float] = field(default_factory=list)


async def cycle(site: Site, clients: int, tokens: int) -> Cycle:
    out = Cycle()
    took = tokens / LONG_RATE
    out.alone = p99(await observe(site, ALONE_SECONDS))

    loop = asyncio.get_running_loop()
    readers = []
    for _ in range(clients):
        data = request(site, "long", tokens)
        readers.append((await loop.create_connection(lambda data=data: Reader(data), "127.0.0.1", site.port))[1])
    out.reading = p99(await observe(site, took - 2))
    await asyncio.gather(*(r.done for r in readers))
    await asyncio.sleep(2)

    before, counted = site.rss(), cuts(site)
    began = time.monotonic()
    sockets = [never_reads(site, "sse" if i % 2 else "ws", tokens) for i in range(clients)]
    out.not_reading = p99(await observe(site, took - 2))
    await asyncio.sleep(max(0.0, began + took + 1 - time.monotonic()))  # every token has been made
    out.mib_each = (site.rss() - before) / clients
    deadline = time.monotonic() + SEND_TIMEOUT + 15
    while out.cut + out.unanswered < clients and time.monotonic() < deadline:
        now = [a - b for a, b in zip(cuts(site), counted, strict=True)]
        out.cut_after += [time.monotonic() - began] * (sum(now) - out.cut - out.unanswered)
        out.cut, out.unanswered = now
        await asyncio.sleep(0.5)
    for sock in sockets:
        sock.close()
    return out


async def measure(args: argparse.Namespace) -> bool:
    with (
        tempfile.TemporaryDirectory(prefix="sluice-slow-") as folder,
        site(folder, MODELS, SLUICE_SEND_TIMEOUT=str(SEND_TIMEOUT)) as live,
    ):
        os.sched_setaffinity(0, {1})
        await observe(live, 3.0)
        cycles = []
        for number in range(args.cycles):
            cycles.append(await cycle(live, args.clients, args.tokens))
            print(f"  cycle {number + 1}: {cycles[-1]}", file=sys.stderr, flush=True)
    return report(cycles, args.clients, args.tokens)


def report(cycles: list[Cycle], clients: int, tokens: int) -> bool:
    """Print the table; true where the bounds hold."""
    growth = statistics.median(c.not_reading / c.reading for c in cycles)
    mib = max(c.mib_each for c in cycles)
    cut = [f"{c.cut} + {c.unanswered}" for c in cycles]
    times = [t for c in cycles for t in c.cut_after]
    span = f"{min(times):.0f} to {max(times):.0f}" if times else "never"
    rows = [
        ("server memory per client that never reads, MiB (worst)", f"{mib:.2f}", f"< {MAX_MIB:g}", mib < MAX_MIB),
        ("p99 between tokens of others beside them / beside clients that read", f"{growth:.2f}", f"< {MAX_GROWTH:g}",
         growth < MAX_GROWTH),
        ("clients cut, per cycle: counted as slow + as answering no ping (WebSocket)", ", ".join(cut), str(clients),
         all(c.cut + c.unanswered == clients and c.cut >= clients // 2 for c in cycles)),
        (f"cut after, s (send timeout {SEND_TIMEOUT} s from the last byte taken; pings 20 + 20 s)", span, "-", True),
    ]  # fmt: skip
    print(f"{clients} clients, {tokens} tokens each, {LONG_RATE} tokens/s; {OBSERVERS} observed streams of "
          f"{OBSERVED_RATE} tokens/s; {len(cycles)} cycles\n")  # fmt: skip
    print("| what | measured | bound | |\n|---|---|---|---|")
    for what, value, bound, good in rows:
        print(f"| {what} | {value} | {bound} | {'ok' if good else '**MISSED**'} |")
    print("\n| p99 between tokens of the observed streams, ms | " + " | ".join(
        f"cycle {i + 1}" for i in range(len(cycles))) + " |\n" + "|---" * (len(cycles) + 1) + "|")  # fmt: skip
    for name, label in (("alone", "alone"), ("reading", "beside clients that read"),
                        ("not_reading", "beside clients that never read")):  # fmt: skip
        print(f"| {label} | " + " | ".join(f"{getattr(c, name) * 1000:.1f}" for c in cycles) + " |")
    return all(row[3] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=5000)
    args = parser.parse_args()
    print(machine())
    return 0 if asyncio.run(measure(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
