"""What open admin pages cost the streams and Redis while thousands of requests are in flight.

    python -m benchmarks.admin_pages [--inflight 5000] [--streams 200] [--pages 5] [--keys 1000000]

Phases without and with the pages take turns, so that drift of the machine falls on both alike. Half of the pages
show the plain list, half a filtered or sorted one, which has to look at every request. Measured are the time
between tokens as clients see it, the round trip of a PING to Redis every 5 ms, and what Redis says of its own
commands. The ratios are what matters: absolute figures are those of two processors that also run the clients.
Exit status 1 where a bound is missed: no KEYS or SCAN, Redis p99 below 5 ms, the streams' p99 within a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import redis.asyncio as redis_async

from benchmarks.processes import ROOT, environment, machine, manage
from benchmarks.site import Site, site
from benchmarks.slow_readers import Reader, p99, request
from inference.config import Config
from inference.messages import Job, SamplingParams, ServerBeat, encode
from inference.redisio import Commander, connect
from inference.store import RequestStore, Submission

RATE = 5
MODELS = f"observed=scripted:rate={RATE},slots=1024,context=100000 parked=scripted:rate=1,slots=1,context=100000"
QUERIES = ("", "q=parked-1", "page=3", "phase=queued&sort=-id", "owner=user:1", "model=parked&sort=age")
OWNER = "s-parked"
"""A server that is a heartbeat only: what waits here has no client."""
MAX_REDIS, MAX_GROWTH = 0.005, 1.10
FILL = "for i = ARGV[1], ARGV[2] do redis.call('SET', 'unrelated:' .. i, i) end"
SIGN_IN = """
from django.contrib.auth.models import User
from django.test import Client
client = Client()
client.force_login(User.objects.create_superuser("op", "", "x"))
print(client.cookies["sessionid"].value)
"""


def sign_in(settings: dict[str, str]) -> str:
    """The cookie of an operator's session."""
    shell = manage("shell", "--no-imports", "-c", SIGN_IN)
    run = subprocess.run(
        shell, cwd=ROOT, env=environment(settings), check=True, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    return run.stdout.split()[-1]


async def park(url: str, count: int) -> None:
    """Put requests into the queue of a model that never gets to them."""
    config = Config(redis_url=url, models=MODELS, max_queued=10**6, queue_timeout=7200.0)
    redis = Commander(lambda: connect(url, timeout=10.0, client_name="bench"), name="bench")
    redis.start()
    store = RequestStore(redis, config, counts=False)
    beat = ServerBeat(OWNER, "bench", os.getpid(), "serving", {}, count, 0, int(time.time() * 1000), "1")
    await redis.call("SET", store.keys.server_beat(OWNER), encode(beat), "PX", 3_600_000)
    await redis.call("SADD", store.keys.servers, OWNER)
    for start in range(0, count, 500):
        jobs = [
            Job(f"parked-{n}", "parked", [1] * 20, SamplingParams(max_tokens=90_000))
            for n in range(start, min(count, start + 500))
        ]
        await asyncio.gather(*(
            store.submit(
                Submission(job, "chat", "sse", f"user:{n % 7}", "10.0.0.9", timeout=7200.0), server=OWNER, slots=1
            )
            for n, job in enumerate(jobs)
        ))  # fmt: skip
    await redis.stop()


class Page(asyncio.Protocol):
    """An open page: its event stream, counted."""

    def __init__(self, query: str, cookie: str) -> None:
        self._query, self._cookie = query, cookie
        self.updates = self.size = 0
        self.refused = ""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        head = (
            f"GET /inflight/live?{self._query} HTTP/1.1\r\nHost: localhost\r\nCookie: sessionid={self._cookie}\r\n\r\n"
        )
        transport.write(head.encode())

    def data_received(self, data: bytes) -> None:
        if not self.size and b" 200 " not in data[:20]:
            self.refused = data[:200].decode("latin-1")
        self.size += len(data)
        self.updates += data.count(b"data: {")


class Phase:
    """The figures of all phases of one kind."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.pings: list[float] = []
        self.script_p99: list[float] = []
        self.commands = 0
        self.scans = 0
        self.updates = 0
        self.seconds = 0.0

    async def measure(self, client: redis_async.Redis, readers: list[Reader], seconds: float) -> None:
        await client.config_resetstat()
        seen = [len(r.gaps) for r in readers]
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            await client.ping()
            self.pings.append(time.perf_counter() - now)
            await asyncio.sleep(0.005)
        for reader, before in zip(readers, seen, strict=True):
            self.gaps += reader.gaps[before:]
        latency, stats = await client.info("latencystats"), await client.info("commandstats")
        self.script_p99.append(float(latency["latency_percentiles_usec_evalsha"]["p99"]) / 1e6)
        self.commands += sum(s["calls"] for s in stats.values()) - len(self.pings)
        self.scans += sum(
            stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("keys", "scan", "zscan", "sscan")
        )
        self.seconds += seconds


async def run(args: argparse.Namespace) -> bool:
    """The whole measurement; whether every bound holds."""
    settings = {"SLUICE_MAX_QUEUED": "100000", "SLUICE_QUEUE_TIMEOUT": "7200", "SLUICE_REQUEST_TIMEOUT": "7200"}
    with tempfile.TemporaryDirectory() as folder, site(folder, MODELS, **settings) as deployment:
        cookie = sign_in(deployment.env)
        client = redis_async.Redis.from_url(deployment.redis_url)
        for start in range(0, args.keys, 50_000):
            await client.eval(FILL, 0, start, min(args.keys, start + 50_000) - 1)
        await park(deployment.redis_url, args.inflight - args.streams)
        readers = await streams(deployment, args)
        without, beside = Phase(), Phase()
        for _ in range(args.rounds):
            await without.measure(client, readers, args.seconds)
            pages = await open_pages(deployment, args.pages, cookie)
            await asyncio.sleep(3)  # the first update of a page carries all of it
            before = sum(p.updates for p in pages)
            await beside.measure(client, readers, args.seconds)
            beside.updates += sum(p.updates for p in pages) - before
            for page in pages:
                page.transport.abort()
            await asyncio.sleep(1)
        live = int(await client.zcard("sluice:live"))
        await client.aclose()
        for reader in readers:
            reader.transport.abort()
    return report(args, live, without, beside)


async def streams(deployment: Site, args: argparse.Namespace) -> list[Any]:
    loop = asyncio.get_running_loop()
    tokens = int(RATE * (args.rounds * (2 * args.seconds + 10) + 120))
    data = request(deployment, "observed", tokens)
    readers = []
    for _ in range(args.streams):
        transport, reader = await loop.create_connection(lambda: Reader(data), "127.0.0.1", deployment.port)
        reader.transport = transport  # type: ignore[attr-defined]
        readers.append(reader)
    deadline = time.monotonic() + 60
    while any(len(r.gaps) < 5 for r in readers):
        if time.monotonic() > deadline:
            raise SystemExit("the streams did not begin")
        await asyncio.sleep(0.1)
    return readers


async def open_pages(deployment: Site, count: int, cookie: str) -> list[Page]:
    loop = asyncio.get_running_loop()
    pages = []
    for number in range(count):
        query = QUERIES[number % len(QUERIES)]
        _, page = await loop.create_connection(
            lambda query=query: Page(query, cookie), "127.0.0.1", deployment.port
        )  # fmt: skip
        pages.append(page)
    await asyncio.sleep(1)
    if refused := [p.refused for p in pages if p.refused]:
        raise SystemExit(f"a page was refused: {refused[0]}")
    return pages


def report(args: argparse.Namespace, live: int, without: Phase, beside: Phase) -> bool:
    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    rows = [
        ("time between tokens, median", middle(without.gaps), middle(beside.gaps)),
        ("time between tokens, p99", p99(without.gaps), p99(beside.gaps)),
        ("PING to Redis, median", middle(without.pings), middle(beside.pings)),
        ("PING to Redis, p99", p99(without.pings), p99(beside.pings)),
        ("scripts inside Redis, p99", max(without.script_p99), max(beside.script_p99)),
    ]
    print(
        f"{live} in flight, {args.streams} of them streams; {args.pages} pages; {args.keys} keys of others; {machine()}"
    )
    print(f"{beside.updates / beside.seconds:.1f} updates of pages per second; KEYS and SCAN: {beside.scans}\n")
    print(f"| | without | with {args.pages} pages | ratio |\n|---|---|---|---|")
    for what, a, b in rows:
        print(f"| {what} | {a * 1000:.2f} ms | {b * 1000:.2f} ms | {b / a:.2f} |")
    a, b = without.commands / without.seconds, beside.commands / beside.seconds
    print(f"| Redis commands per second | {a:.0f} | {b:.0f} | {b / a:.2f} |")
    return not beside.scans and rows[3][2] < MAX_REDIS and rows[1][2] <= rows[1][1] * MAX_GROWTH


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="admin_pages", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inflight", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3)
    return 0 if asyncio.run(run(parser.parse_args(argv))) else 1


if __name__ == "__main__":
    sys.exit(main())
