"""Mixed load with every kind of ending and fault at once, then the proof that nothing is left.

``make soak`` sends 20,000 requests to real servers and workers; ``ARGS`` chooses:
``--requests N``, ``--minutes M`` (at least so long), ``--seed S``, ``--clients C``,
``--quick`` (about a minute). Prints a closing table; exit status 1 where a line of it fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from websockets.exceptions import WebSocketException

from inference.errors import StoreUnavailable
from inference.messages import Ending, decode_ending
from inference.store import audit
from tests.faults import ledger
from tests.faults.harness import Exchange, Process, Rig, Server
from tests.faults.transports import STREAMING, TRANSPORTS, Call
from tests.support import eventually

ENDINGS = {
    "finish": 45,
    "disconnect at once": 8,
    "disconnect in decode": 12,
    "cancel at once": 8,
    "cancel in decode": 12,
    "deadline": 7,
    "resumable, left and read on": 5,
    "engine error": 3,
}
FAULTS = {"worker SIGKILL": 4, "server SIGKILL": 2, "Redis connections killed": 3, "Redis paused 1 s": 1}


class Soak:
    """One run: the deployment, what was sent, and what came of it."""

    def __init__(self, rig: Rig, args: argparse.Namespace) -> None:
        self.rig = rig
        self.args = args
        self.chance = random.Random(args.seed)
        self.servers: list[Server] = []
        self.pools: list[Process] = []
        self.sent: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()
        self.ids: dict[str, str] = {}
        self.wrong: list[str] = []
        self.rows: list[tuple[str, str, bool]] = []
        self.tasks_before = 0

    async def start(self) -> None:
        """Two pools with one worker each, two servers of which the first is never killed."""
        self.pools = list(await asyncio.gather(self.rig.pool(), self.rig.pool()))
        self.servers = [await self.rig.server(), await self.rig.server()]

    # -- one request ---------------------------------------------------------------------------------

    async def one(self, ending: str) -> None:
        self.sent[ending] += 1
        server = self.chance.choice(self.servers)
        try:
            async with asyncio.timeout(90):
                await self._one(ending, server)
        except TimeoutError:
            self.wrong.append(f"{ending}: no end within 90 s")
        except (OSError, asyncio.IncompleteReadError, WebSocketException):
            self.replies["connection lost"] += 1

    async def _one(self, ending: str, server: Server) -> None:
        chance = self.chance
        resumable = ending.startswith("resumable")
        kind = chance.choice(STREAMING if "cancel" in ending else TRANSPORTS)
        kind = "sse-generate" if resumable else kind
        fields: dict[str, Any] = {"resumable": True} if resumable else {}
        if ending == "deadline":
            fields["timeout"] = chance.uniform(0.05, 0.6)
        tokens = chance.choice((1, 5, 20, 60)) if ending == "finish" else chance.choice((200, 2000))
        tokens = 100 if resumable else tokens
        prompt = "[[error@3]]" if ending == "engine error" else "x" * chance.choice((5, 50, 400))
        call = await Call.begin(self.rig, server, kind, tokens, prompt=prompt, find=False, **fields)
        if ending == "disconnect at once":
            await asyncio.sleep(chance.random() * 0.05)
            await call.leave()
        elif ending == "disconnect in decode":
            await self._some(call)
            await call.leave()
        elif resumable:
            await self._some(call)
            await call.leave()
            await self._read_on(call)
        elif ending.startswith("cancel"):
            if ending == "cancel in decode":
                await self._some(call)
            await self._cancel(call)
            await self._end(call, ending)
        else:
            await self._end(call, ending)
        if call.id:
            self.ids[call.id] = ending

    async def _some(self, call: Call) -> None:
        """Until a few pieces have come, or the response has ended."""
        reading = call.reading()
        want = self.chance.randint(1, 5)
        while len(call.reply.pieces) < want and not reading.done():
            await asyncio.wait([reading], timeout=0.02)

    async def _cancel(self, call: Call) -> None:
        reading = call.reading()
        while not call.id and not reading.done():
            await asyncio.wait([reading], timeout=0.01)
        if not call.id:
            return
        for _ in range(self.chance.choice((1, 1, 2))):
            exchange = await self.servers[0].post(f"/v1/requests/{call.id}/cancel", {})
            if exchange.status not in (200, 404, 503):
                self.wrong.append(f"cancel answered {exchange.status}")
            await exchange.close()

    async def _read_on(self, call: Call) -> None:
        if not call.id:
            return
        exchange = await Exchange.open(self.servers[0].port, "GET", f"/v1/requests/{call.id}/events", key=self.rig.key)
        if exchange.status == 200:
            events = [e async for e in exchange.events()]
            self.replies["read on to the end" if events and events[-1] == "[DONE]" else "read on: error"] += 1
        else:
            self.replies[f"read on: {exchange.status}"] += 1
        await exchange.close()

    async def _end(self, call: Call, ending: str) -> None:
        reply = await call.finish(80)
        if reply.done:
            self.replies["complete"] += 1
        elif reply.error is not None:
            self.replies[f"error {reply.error.get('code')}"] += 1
        elif call.exchange is not None and call.status == 200:
            self.wrong.append(f"{ending} ({call.kind}): ended with neither [DONE] nor an error")
        if call.exchange is not None:
            await call.exchange.close()

    # -- faults --------------------------------------------------------------------------------------

    async def disturb(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.chance.uniform(2.0, 6.0) * self.args.calm):
                    await stop.wait()
                    return
            kind = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
            try:
                await self._fault(kind)
            except StoreUnavailable:
                continue
            self.faults[kind] += 1

    async def _fault(self, kind: str) -> None:
        if kind == "worker SIGKILL":
            workers = [w for w in await self.rig.views.workers() if w.state == "ready"]
            if len(workers) > 1:
                os.kill(self.chance.choice(workers).pid, signal.SIGKILL)
        elif kind == "server SIGKILL":
            self.servers[1].process.signal(signal.SIGKILL)
            self.servers[1] = self.servers[0]
            self.servers[1] = await self.rig.server()
        elif kind == "Redis paused 1 s":
            self.rig.valkey.signal(signal.SIGSTOP)
            await asyncio.sleep(1)
            self.rig.valkey.signal(signal.SIGCONT)
        else:
            which = self.chance.choice(("normal", "pubsub"))
            await self.rig.redis.call("CLIENT", "KILL", "TYPE", which, "SKIPME", "yes")

    # -- load ----------------------------------------------------------------------------------------

    async def load(self, requests: int, seconds: float = 0.0) -> None:
        began, sent = time.monotonic(), 0

        async def client() -> None:
            nonlocal sent
            while sent < requests or time.monotonic() - began < seconds:
                sent += 1
                if sent % 1000 == 0:
                    print(f"  {sent} requests, {time.monotonic() - began:.0f} s", flush=True)
                await self.one(self.chance.choices(list(ENDINGS), list(ENDINGS.values()))[0])

        await asyncio.gather(*(client() for _ in range(self.args.clients)))

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """(open files, threads, resident MiB) of the processes that live through the run."""
        named = {"server": self.servers[0].process, "pool 1": self.pools[0], "pool 2": self.pools[1]}
        out = {}
        for name, process in named.items():
            base = Path(f"/proc/{process.pid}")
            pages = int((base / "statm").read_text().split()[1])
            out[name] = (
                len(os.listdir(base / "fd")), len(os.listdir(base / "task")),
                pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
            )  # fmt: skip
        return out

    async def tasks(self) -> int:
        """Tasks in the event loop of the server that lives through the run, by its own heartbeat."""
        pid = self.servers[0].process.pid
        return next(s.tasks for s in await self.rig.views.servers() if s.pid == pid)

    # -- the proof -----------------------------------------------------------------------------------

    def row(self, what: str, value: object, good: bool) -> None:
        self.rows.append((what, str(value), good))

    async def close(self, before: dict[str, tuple[int, int, int]]) -> None:
        """Wait for quiet, then compare everything with everything."""
        rig = self.rig
        began = time.monotonic()
        try:
            await eventually(rig.is_quiet, 45, what="nothing in flight")
        except AssertionError:
            self.row("quiet", "never", False)
        self.row("quiet after, s", f"{time.monotonic() - began:.1f}", True)
        await eventually(lambda: self._two_workers(), 60, what="both pools serve again")
        report = await audit(rig.store)
        self.row("audit findings", len(report.findings), report.clean)
        self.row("records left", report.records, report.records == 0)
        workers = await rig.views.workers()
        held = sum(w.held + w.stats.running + w.stats.waiting for w in workers)
        self.row("engine slots held", held, held == 0)
        with contextlib.suppress(AssertionError):  # a killed server's last heartbeat lives on for its TTL
            await eventually(lambda: self._open_none(), 10, what="nothing open")
        gauges = await self._open()
        self.row("open exchanges, streams, unsettled", gauges, gauges == 0)
        await self._endings()
        await self._counters()
        await self._aborts()
        with contextlib.suppress(AssertionError):  # the rows below judge
            await eventually(lambda: self._steady(before), 20, what="steady")
        for name, (files, threads, mib) in self.usage().items():
            was = before[name]
            self.row(f"{name}: open files (was {was[0]})", files, files <= was[0] + 4)
            self.row(f"{name}: threads (was {was[1]})", threads, threads <= was[1] + 4)
            self.row(f"{name}: MiB resident (was {was[2]})", mib, mib <= was[2] * 1.3 + 40)
        tasks = await self.tasks()
        self.row(f"server: tasks in its event loop (was {self.tasks_before})", tasks, tasks <= self.tasks_before + 4)
        log = self.servers[0].process.log() + "".join(p.log() for p in self.pools)
        self.row("tracebacks in logs", log.count("Traceback"), "Traceback" not in log)
        self.row("wrong replies", len(self.wrong), not self.wrong)
        await self._still_serves()

    async def _open(self) -> int:
        """Open exchanges, streams and unsettled requests of all servers, by their heartbeats."""
        servers = await self.rig.views.servers()
        return sum(s.streams + s.unsettled + sum(s.exchanges.values()) for s in servers)

    async def _open_none(self) -> bool:
        return await self._open() == 0

    async def _two_workers(self) -> bool:
        return len([w for w in await self.rig.views.workers() if w.state == "ready"]) == 2

    async def _steady(self, before: dict[str, tuple[int, int, int]]) -> bool:
        return all(now[0] <= before[name][0] + 4 for name, now in self.usage().items())

    async def _counters(self) -> None:
        """What the metrics of all processes say, dead ones included."""
        counted = self.rig.counted
        started, ended = counted("sluice_requests_started_total"), counted("sluice_requests_total")
        self.row("metrics: started", f"{started:g}", started > 0)
        # A process that is killed between the settling of a request and its count takes that count along.
        allowed = self.faults["server SIGKILL"] + self.faults["worker SIGKILL"]
        self.row("metrics: started, not counted as ended", f"{started - ended:g}", abs(started - ended) <= allowed)
        first = counted("sluice_time_to_first_token_seconds_count")
        self.row("metrics: requests with a first token", f"{first:g}", 0 < first <= ended)
        gaps = counted("sluice_inter_token_latency_seconds_count")
        self.row("metrics: times between tokens", f"{gaps:g}", gaps > 0)
        # Resumable requests have several readers here, and killed servers take along what they had measured.
        self.rig.uncounted = ledger.Allowance(killed=allowed, all_reread=True)
        try:
            await eventually(self.rig.is_accounted, 10, every=0.2)
        except AssertionError as exc:
            self.row("metrics, logs and gauges balance", exc.__cause__ or exc, False)
        else:
            self.row("metrics, logs and gauges balance", "yes", True)

    async def _endings(self) -> None:
        raw = await self.rig.redis.call("LRANGE", self.rig.store.keys.history, 0, -1)
        history: list[Ending] = [decode_ending(e) for e in raw]
        times = Counter(e.id for e in history)
        outcomes = await self.rig.views.outcomes()
        twice = [i for i, n in times.items() if n > 1]
        missing = [i for i in self.ids if i not in times]
        self.row("requests sent", sum(self.sent.values()), True)
        self.row("requests stored (ids that clients know)", f"{len(times)} ({len(self.ids)})", True)
        total = sum(outcomes.values())
        self.row("sum of outcomes = stored", total, total == len(times) == len(history))
        self.row("ended twice", len(twice), not twice)
        self.row("never ended", len(missing), not missing)
        for name, count in sorted(outcomes.items()):
            self.row(f"  {name}", count, True)

    async def _aborts(self) -> None:
        twice = sum(n > 1 for n in Counter(i for i, _ in self.rig.aborts).values())
        self.row("aborts sent (requests aborted twice)", f"{len(self.rig.aborts)} ({twice})", twice == 0)

    async def _still_serves(self) -> None:
        call = await Call.begin(self.rig, self.servers[0], "sse-chat", 5, find=False)
        self.row("still serves", "yes", (await call.finish(20)).done)

    def print(self, seconds: float) -> bool:
        print(f"\nSoak: {sum(self.sent.values())} requests in {seconds:.0f} s, seed {self.args.seed}")
        print("endings asked for: " + ", ".join(f"{k} {v}" for k, v in sorted(self.sent.items())))
        print("faults: " + ", ".join(f"{k} {v}" for k, v in sorted(self.faults.items())))
        print("replies: " + ", ".join(f"{k} {v}" for k, v in sorted(self.replies.items())))
        print("\n| what | value | |\n|---|---|---|")
        for what, value, good in self.rows:
            print(f"| {what} | {value} | {'ok' if good else '**WRONG**'} |")
        for text in self.wrong[:10]:
            print("wrong:", text)
        return all(good for _, _, good in self.rows)


async def run(args: argparse.Namespace) -> bool:
    """The whole soak; true where every line of its table holds."""
    if args.quick:
        args.requests, args.clients = 600, 16
    settings = {
        "SLUICE_MODELS": "scripted=scripted:rate=200,prefill=0.5,faults=1,context=20000,slots=12",
        "SLUICE_HISTORY_SIZE": 10_000_000,
        "SLUICE_MAX_ATTEMPTS": 6,
        "SLUICE_RESUME_GRACE": 5,
        "SLUICE_LOG_RETENTION": 5,
        "SLUICE_PRE_DRAIN": 0,
    }
    with tempfile.TemporaryDirectory(prefix="sluice-soak-") as folder:
        async with Rig(Path(folder), **settings) as rig:
            soak = Soak(rig, args)
            await soak.start()
            await soak.load(min(200, args.requests // 4))
            await eventually(rig.is_quiet, 30, what="quiet after the warm-up")
            before = soak.usage()
            soak.tasks_before = await soak.tasks()
            began = time.monotonic()
            stop = asyncio.Event()
            disturbing = asyncio.create_task(soak.disturb(stop))
            await soak.load(args.requests, args.minutes * 60)
            stop.set()
            await disturbing
            seconds = time.monotonic() - began
            await soak.close(before)
            good = soak.print(seconds)
            if not good:
                await _explain(rig)
            return good


async def _explain(rig: Rig) -> None:
    report = await audit(rig.store)
    print("\n".join(report.findings[:20]))
    for view in (await rig.views.page(0, 20)).items:
        print(view)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for at least so long")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", type=float, default=1.0, help="stretch the time between faults")
    parser.add_argument("--quick", action="store_true", help="about a minute: 600 requests")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``make soak``."""
    args = arguments().parse_args(argv)
    return 0 if asyncio.run(run(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
