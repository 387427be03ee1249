"""``make prove-hosts``: hosts in network namespaces, cut off, slowed and healed under load.

Five hosts - a load balancer (HAProxy), two servers, two pools - and two for Redis, a primary and its replica,
watched by three Sentinels (on the load balancer and beside each Redis); all settings are the defaults. The
same load as in the rolling update runs from an eighth namespace. Each scenario disturbs, heals, waits until
nothing is in flight, and audits. Prints a table of what clients got and how long they waited; exit status 1
where a promise of ``docs/guarantees.md`` was broken. Where namespaces are not permitted it says so and exits 0.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis.exceptions import RedisError

from benchmarks.processes import machine
from benchmarks.report import table
from inference.redisio import connect
from inference.store import audit
from proofs import network
from proofs.deployment import ADDRESSES, REDIS_PORT, Hosts
from proofs.haproxy import version
from proofs.load import VERDICTS, Answer, Load
from proofs.network import Network, Unavailable
from tests.support import eventually

#: A pool host is missed by then: heartbeat TTL and one look of a reaper (docs/guarantees.md), and what a busy
#: machine adds until the next token has come.
POOL_BOUND = 6.0 + 3.0
#: With a Redis that is away for less than the outage limit, streams go on once it is back.
OUTAGE_LIMIT = 15.0
DELAY, LOSS = 0.1, 0.01


@dataclass
class Scenario:
    """One disturbance: what was done, what clients got, and what was left.

    Attributes:
        promised: answers that were not whole, as the promises say of this disturbance.
        broken: answers that were not whole and should have been.
    """

    name: str
    answers: list[Answer] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    promised: int = 0
    broken: list[str] = field(default_factory=list)
    quiet: float = 0.0
    findings: list[str] = field(default_factory=list)
    bound: float = 0.0
    notes: str = ""

    @property
    def wait(self) -> float:
        """The longest time without news in a stream that came whole, seconds."""
        return max((a.wait for a in self.answers if a.done and a.kind != "json"), default=0.0)

    def good(self) -> bool:
        in_time = not self.bound or self.wait <= self.bound
        return bool(self.answers) and not self.broken and not self.findings and in_time

    def row(self) -> list[Any]:
        moved = sum(a.moves > 0 and a.done for a in self.answers)
        lost = max((a.wait for a in self.answers if not a.done), default=0.0)
        bound = f"{self.bound:g}" if self.bound else "-"
        return [
            self.name, len(self.answers), self.tally["ok"], self.promised, len(self.broken), self.tally["duplicated"],
            self.tally["wrong"], moved, f"{self.wait:.1f}", bound, f"{lost:.1f}" if lost else "-",
            f"{self.quiet:.1f}", len(self.findings),
            "ok" if self.good() else "**WRONG**",
        ]  # fmt: skip


HEAD = [
    "what is done", "asked", "whole", "lost, as promised", "lost otherwise", "duplicated", "wrong",
    "read on elsewhere", "longest wait, s", "bound, s", "known lost after, s", "quiet after, s", "findings", "",
]  # fmt: skip


Allowed = Callable[[Answer, str, dict[str, list[Any]]], bool]


def nothing_lost(answer: Answer, verdict: str, endings: dict[str, list[Any]]) -> bool:
    return False


class Proof:
    """Scenarios one after the other on the same deployment."""

    slowed = [h for h in ADDRESSES if h != "clients"]

    def __init__(self, hosts: Hosts, load: Load, args: argparse.Namespace) -> None:
        self.hosts = hosts
        self.load = load
        self.args = args
        self.done: list[Scenario] = []

    async def play(
        self, name: str, act: Callable[[], Awaitable[str | None]], *, allowed: Allowed = nothing_lost,
        bound: float = 0.0,
    ) -> None:  # fmt: skip
        """Load, disturbance, healing; then quiet, audit and the judgement of every answer."""
        if self.args.only and not any(part in name for part in self.args.only):
            return
        first = len(self.load.answers)
        self.load.start()
        await asyncio.sleep(3.0)
        notes = await act()
        await eventually(self.hosts.serves, 60, every=0.2, what="all serve again")
        await asyncio.sleep(3.0)
        await self.load.stop()
        scenario = Scenario(name, self.load.answers[first:], bound=bound, notes=notes or "")
        began = time.monotonic()
        try:
            await eventually(self.hosts.quiet, 75, every=0.2, what="nothing in flight")
        except AssertionError as exc:
            scenario.findings.append(str(exc))
        scenario.quiet = time.monotonic() - began
        await asyncio.sleep(1.5)  # the next heartbeats, so that the audit sees what is, not what was
        await self._judge(scenario, allowed)
        self.done.append(scenario)
        print("  " + ", ".join(f"{h} {v}" for h, v in zip(HEAD, scenario.row(), strict=True)), flush=True)
        for line in scenario.broken + scenario.findings + [n for n in [scenario.notes] if n]:
            print("    " + line, flush=True)

    async def _judge(self, scenario: Scenario, allowed: Allowed) -> None:
        report = await audit(self.hosts.store)
        scenario.findings += report.findings
        if report.records:
            scenario.findings.append(f"{report.records} records are left")
        endings = await self.hosts.endings()
        scenario.findings += [f"{i} ended {len(e)} times" for i, e in endings.items() if len(e) > 1]
        for answer in scenario.answers:
            verdict = self.load.verdict(answer)
            scenario.tally[verdict] += 1
            if verdict == "ok":
                continue
            if verdict in VERDICTS[1:3] and allowed(answer, verdict, endings):
                scenario.promised += 1
            else:
                scenario.broken.append(
                    f"{verdict}: {answer.kind} {answer.id or '(no id)'}: {answer.error} "
                    f"after {len(answer.text)} characters, {answer.ended - answer.began:.1f} s"
                )

    # -- what is done ----------------------------------------------------------------------------------

    async def nothing(self) -> None:
        await asyncio.sleep(self.args.hold)

    async def cut_pool(self) -> str:
        views = self.hosts.views
        before = {w.pid: w.id for w in await views.workers()}
        cut = await self.hosts.worker_of("p1")
        held = {v.id: v.attempt for v in (await views.page(0, 1000)).items if v.worker == cut}
        self.hosts.change("p1", cut=True)
        await asyncio.sleep(self.args.hold)
        self.hosts.change("p1", cut=False)
        await eventually(self.hosts.serves, 60, every=0.2, what="the pool's worker is seen again")
        back = {w.pid: w.id for w in await views.workers()}
        kept = [v for v in (await views.page(0, 1000)).items if held.get(v.id) == v.attempt and v.worker == cut]
        return (
            f"the worker held {len(held)} requests when it was cut off; it came back as "
            f"{'the same process' if back == before else 'another process'} and {len(kept)} of them were still its own"
        )

    async def cut_server(self) -> None:
        self.hosts.change("s1", cut=True)
        await asyncio.sleep(self.args.hold)
        self.hosts.change("s1", cut=False)

    async def slow_all(self) -> None:
        for host in self.slowed:
            self.hosts.change(host, delay=DELAY, loss=LOSS)
        await asyncio.sleep(self.args.hold * 1.5)
        for host in self.slowed:
            self.hosts.change(host, delay=0.0, loss=0.0)

    async def all_at_once(self) -> str:
        """The network is slow and loses packets, a pool's host is cut off, and then Redis' primary, too."""
        for host in self.slowed:
            self.hosts.change(host, delay=DELAY, loss=LOSS)
        self.hosts.change("p2", cut=True)
        await asyncio.sleep(1.0)
        try:
            notes = await self.fail_redis()
        finally:
            self.hosts.change("p2", cut=False)
            for host in self.slowed:
                self.hosts.change(host, delay=0.0, loss=0.0)
        return notes

    async def fail_redis(self) -> str:
        old = await self.hosts.primary()
        new = "r2" if old == "r1" else "r1"
        began = time.monotonic()
        self.hosts.change(old, cut=True)

        async def promoted() -> bool:
            return await self.hosts.primary() == new

        await eventually(promoted, 30, every=0.1, what="Sentinel has promoted the replica")
        took = time.monotonic() - began
        await asyncio.sleep(self.args.hold)
        self.hosts.change(old, cut=False)
        client = connect(f"redis://{ADDRESSES[old]}:{REDIS_PORT}/0", timeout=2.0, client_name="proof")

        async def demoted() -> bool:
            try:
                return (await client.execute_command("ROLE"))[0] in (b"slave", b"replica")
            except RedisError:
                return False  # a primary that becomes a replica breaks its connections

        try:
            await eventually(demoted, 30, every=0.2, what="the old primary is a replica")
        finally:
            await client.aclose()
        return f"Sentinel had promoted the replica after {took:.1f} s"


async def play_all(hosts: Hosts, load: Load, args: argparse.Namespace) -> Proof:
    proof = Proof(hosts, load, args)
    s1 = await hosts.server_id("s1")

    def with_their_server(answer: Answer, verdict: str, endings: dict[str, list[Any]]) -> bool:
        """Plain requests of the lost server; those that had not begun, and JSON, tell no id."""
        served = endings.get(answer.id)
        return answer.kind != "resumable" and (not answer.id or (served is not None and served[0].server == s1))

    def refused_at_the_door(answer: Answer, verdict: str, endings: dict[str, list[Any]]) -> bool:
        """New requests while no Redis answers: told so, nothing of them was begun."""
        return verdict == "failed" and answer.told and not answer.text

    await proof.play("nothing", proof.nothing)
    await proof.play("a pool's host is cut off, and comes back", proof.cut_pool, bound=POOL_BOUND)
    await proof.play("a server's host is cut off, and comes back", proof.cut_server, allowed=with_their_server)
    await proof.play("100 ms delay and 1 % loss, each host", proof.slow_all, bound=POOL_BOUND)
    await proof.play(
        "Redis' primary is cut off: failover; it comes back", proof.fail_redis, allowed=refused_at_the_door,
        bound=OUTAGE_LIMIT,
    )  # fmt: skip
    await proof.play(
        "all at once: slow network, a pool's host and Redis' primary cut off", proof.all_at_once,
        allowed=refused_at_the_door, bound=OUTAGE_LIMIT + POOL_BOUND,
    )  # fmt: skip
    await proof.play("nothing, after all that", proof.nothing)
    return proof


async def inside(args: argparse.Namespace) -> bool:
    """In the clients' namespace: build the deployment, play, print."""
    folder = Path(args.folder)
    hosts = Hosts(folder, Path(args.control), args.prefix)
    try:
        load = await hosts.start()
        proof = await play_all(hosts, load, args)
        await load.client.aclose()
        logs = [p.log() for n, p in hosts.processes.items() if n in ("s1", "s2", "p1", "p2")]
        await hosts.redis.stop()
    except (AssertionError, SystemExit, httpx.HTTPError):
        for name, process in hosts.processes.items():
            print(f"--- {name}\n{process.log()[-1500:]}", file=sys.stderr)
        raise
    finally:
        hosts.destroy()
        if args.keep_logs:
            shutil.copytree(folder, args.keep_logs, dirs_exist_ok=True, ignore=lambda _, names: [
                n for n in names if not n.endswith(".log")])  # fmt: skip
    traces = sum(log.count("Traceback") for log in logs)
    print("\n" + table(HEAD, [s.row() for s in proof.done]))
    for scenario in proof.done:
        if scenario.notes:
            print(f"{scenario.name}: {scenario.notes}.")
    print(f"tracebacks in the logs of servers and pools: {traces}")
    return bool(proof.done) and all(s.good() for s in proof.done) and not traces


def outside(args: argparse.Namespace, argv: list[str]) -> int:
    """Make the namespaces, run this module again in one of them, take them down."""
    with tempfile.TemporaryDirectory(prefix="sluice-hosts-") as folder:
        try:
            missing = network.netem()
            with Network(ADDRESSES, Path(folder)) as net:
                print(f"{machine()}; {version()}")
                said = f"tc says {missing!r}, so it is not netem" if missing else "not netem, though this kernel has it"
                print(f"{len(ADDRESSES)} namespaces; delay and loss are made by proofs/switch.py ({said})", flush=True)
                command = [
                    "ip", "netns", "exec", net.namespace("clients"), sys.executable, "-m", "proofs.hosts", "--inside",
                    "--folder", folder, "--control", str(net.control), "--prefix", net.namespace(""), *argv,
                ]  # fmt: skip
                return subprocess.run(command).returncode
        except Unavailable as exc:
            print(f"skipped: network namespaces cannot be made here ({exc})")
            return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``make prove-hosts``."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="prove-hosts", description=__doc__)
    parser.add_argument(
        "--hold", type=float, default=12.0, help="how long each disturbance lasts, seconds (default 12)"
    )
    parser.add_argument("--only", action="append", help="play scenarios with this in their name; repeatable")
    parser.add_argument("--keep-logs", help="folder to copy the logs to")
    for hidden in ("--folder", "--control", "--prefix"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.inside:
        return outside(args, argv)
    return 0 if asyncio.run(inside(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
