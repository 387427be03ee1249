"""What a soak must leave: nothing in flight, every ending counted once, and processes no larger than before."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

from benchmarks.soak_traffic import Traffic
from inference.messages import Ending, decode_ending
from inference.store import audit
from tests.faults import ledger
from tests.faults.transports import Call
from tests.support import eventually


class Proof:
    """The closing table of one run."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.rig = traffic.rig
        self.rows: list[tuple[str, str, bool]] = []
        self._before: dict[str, tuple[int, int, int]] = {}
        self._tasks_before = 0

    async def begin(self) -> None:
        """Remember what the processes use now, warm and quiet."""
        self._before = self._usage()
        self._tasks_before = await self._tasks()

    def _row(self, what: str, value: object, good: bool) -> None:
        self.rows.append((what, str(value), good))

    async def close(self) -> None:
        """Wait for quiet, then compare everything with everything."""
        rig = self.rig
        began = time.monotonic()
        try:
            await eventually(rig.is_quiet, 45, what="nothing in flight")
        except AssertionError:
            self._row("quiet", "never", False)
        self._row("quiet after, s", f"{time.monotonic() - began:.1f}", True)
        await eventually(lambda: self._two_workers(), 60, what="both pools serve again")
        report = await audit(rig.store)
        self._row("audit findings", len(report.findings), report.clean)
        self._row("records left", report.records, report.records == 0)
        workers = await rig.views.workers()
        held = sum(w.held + w.stats.running + w.stats.waiting for w in workers)
        self._row("engine slots held", held, held == 0)
        with contextlib.suppress(AssertionError):  # a killed server's last heartbeat lives on for its TTL
            await eventually(lambda: self._open_none(), 10, what="nothing open")
        gauges = await self._open()
        self._row("open exchanges, streams, unsettled", gauges, gauges == 0)
        await self._endings()
        await self._counters()
        await self._aborts()
        with contextlib.suppress(AssertionError):  # the rows below judge
            await eventually(lambda: self._steady(), 20, what="steady")
        for name, (files, threads, mib) in self._usage().items():
            was = self._before[name]
            self._row(f"{name}: open files (was {was[0]})", files, files <= was[0] + 4)
            self._row(f"{name}: threads (was {was[1]})", threads, threads <= was[1] + 4)
            self._row(f"{name}: MiB resident (was {was[2]})", mib, mib <= was[2] * 1.3 + 40)
        tasks = await self._tasks()
        self._row(f"server: tasks in its event loop (was {self._tasks_before})", tasks, tasks <= self._tasks_before + 4)
        log = self.traffic.servers[0].process.log() + "".join(p.log() for p in self.traffic.pools)
        self._row("tracebacks in logs", log.count("Traceback"), "Traceback" not in log)
        self._row("wrong replies", len(self.traffic.wrong), not self.traffic.wrong)
        await self._still_serves()

    async def _open(self) -> int:
        """Open exchanges, streams and unsettled requests of all servers, by their heartbeats."""
        servers = await self.rig.views.servers()
        return sum(s.streams + s.unsettled + sum(s.exchanges.values()) for s in servers)

    async def _open_none(self) -> bool:
        return await self._open() == 0

    async def _two_workers(self) -> bool:
        return len([w for w in await self.rig.views.workers() if w.state == "ready"]) == 2

    async def _steady(self) -> bool:
        return all(now[0] <= self._before[name][0] + 4 for name, now in self._usage().items())

    async def _counters(self) -> None:
        """What the metrics of all processes say, dead ones included."""
        counted = self.rig.counted
        started, ended = counted("sluice_requests_started_total"), counted("sluice_requests_total")
        self._row("metrics: started", f"{started:g}", started > 0)
        # A process that is killed between the settling of a request and its count takes that count along.
        allowed = self.traffic.faults["server SIGKILL"] + self.traffic.faults["worker SIGKILL"]
        self._row("metrics: started, not counted as ended", f"{started - ended:g}", abs(started - ended) <= allowed)
        first = counted("sluice_time_to_first_token_seconds_count")
        self._row("metrics: requests with a first token", f"{first:g}", 0 < first <= ended)
        gaps = counted("sluice_inter_token_latency_seconds_count")
        self._row("metrics: times between tokens", f"{gaps:g}", gaps > 0)
        # Resumable requests have several readers here, and killed servers take along what they had measured.
        self.rig.uncounted = ledger.Allowance(killed=allowed, all_reread=True)
        try:
            await eventually(self.rig.is_accounted, 10, every=0.2)
        except AssertionError as exc:
            self._row("metrics, logs and gauges balance", exc.__cause__ or exc, False)
        else:
            self._row("metrics, logs and gauges balance", "yes", True)

    async def _endings(self) -> None:
        raw = await self.rig.redis.call("LRANGE", self.rig.store.keys.history, 0, -1)
        history: list[Ending] = [decode_ending(e) for e in raw]
        times = Counter(e.id for e in history)
        outcomes = await self.rig.views.outcomes()
        twice = [i for i, n in times.items() if n > 1]
        missing = [i for i in self.traffic.ids if i not in times]
        self._row("requests sent", sum(self.traffic.sent.values()), True)
        self._row("requests stored (ids that clients know)", f"{len(times)} ({len(self.traffic.ids)})", True)
        total = sum(outcomes.values())
        self._row("sum of outcomes = stored", total, total == len(times) == len(history))
        self._row("ended twice", len(twice), not twice)
        self._row("never ended", len(missing), not missing)
        for name, count in sorted(outcomes.items()):
            self._row(f"  {name}", count, True)

    async def _aborts(self) -> None:
        twice = sum(n > 1 for n in Counter(i for i, _ in self.rig.aborts).values())
        self._row("aborts sent (requests aborted twice)", f"{len(self.rig.aborts)} ({twice})", twice == 0)

    async def _still_serves(self) -> None:
        call = await Call.begin(self.rig, self.traffic.servers[0], "sse-chat", 5, find=False)
        self._row("still serves", "yes", (await call.finish(20)).done)

    def _usage(self) -> dict[str, tuple[int, int, int]]:
        """(open files, threads, resident MiB) of the processes that live through the run."""
        named = {
            "server": self.traffic.servers[0].process,
            "pool 1": self.traffic.pools[0],
            "pool 2": self.traffic.pools[1],
        }
        out = {}
        for name, process in named.items():
            base = Path(f"/proc/{process.pid}")
            pages = int((base / "statm").read_text().split()[1])
            out[name] = (
                len(os.listdir(base / "fd")), len(os.listdir(base / "task")),
                pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
            )  # fmt: skip
        return out

    async def _tasks(self) -> int:
        """Tasks in the event loop of the server that lives through the run, by its own heartbeat."""
        pid = self.traffic.servers[0].process.pid
        return next(s.tasks for s in await self.rig.views.servers() if s.pid == pid)

    def print(self, seconds: float) -> bool:
        """Show the table of a run that took so long; true where every row holds."""
        print(f"\nSoak: {sum(self.traffic.sent.values())} requests in {seconds:.0f} s, seed {self.traffic.args.seed}")
        print("endings asked for: " + ", ".join(f"{k} {v}" for k, v in sorted(self.traffic.sent.items())))
        print("faults: " + ", ".join(f"{k} {v}" for k, v in sorted(self.traffic.faults.items())))
        print("replies: " + ", ".join(f"{k} {v}" for k, v in sorted(self.traffic.replies.items())))
        print("\n| what | value | |\n|---|---|---|")
        for what, value, good in self.rows:
            print(f"| {what} | {value} | {'ok' if good else '**WRONG**'} |")
        for text in self.traffic.wrong[:10]:
            print("wrong:", text)
        return all(good for _, _, good in self.rows)
