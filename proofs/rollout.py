"""``make prove-rollout``: rolling updates as Kubernetes makes them, under load, and not one answer is lost.

Two servers and two pools (scripted engine) behind HAProxy with readiness checks, clients of every
transport, and rounds in which every process is replaced as by a Deployment: a new server first
(maxSurge 1), then the old one gets the end of its endpoint (late), its preStop, SIGTERM, and SIGKILL after
its grace; pools one after the other (maxUnavailable 1). The times are those of
``deploy/kubernetes/sluice.yaml``, all divided by ``--scale``. In every second round nobody takes the server out of
HAProxy but its own readiness, and pools hand back what they have not ended within a second. Prints a table; exit
status 1 where one answer of it was not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.processes import machine
from benchmarks.report import table
from inference.messages import decode_ending
from inference.store import audit
from proofs.haproxy import HAProxy, version
from proofs.load import VERDICTS, Answer, Load
from tests.faults.harness import Process, Rig, Server
from tests.support import eventually, find_free_port

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "deploy/kubernetes/sluice.yaml"
RATE = 25
PROMPTS = [("a short answer", 20), ("an answer", 60), ("another answer", 90), ("a long answer", 150)]
CLIENTS = ["sse"] * 4 + ["json"] * 3 + ["ws"] * 3 + ["ws-kept"] * 2
SLOTS = 4
#: How late an endpoint goes, as a part of the time in which the server still serves.
LATE = 0.6


@dataclass(frozen=True)
class Times:
    """Seconds of one pod's end; ``manifest`` are those of the deployment, ``played`` what is run."""

    pre_stop: float
    pre_drain: float
    deadline: float
    grace: float
    drain_timeout: float

    @classmethod
    def from_manifest(cls, path: Path = MANIFEST) -> Times:
        documents = [d for d in yaml.safe_load_all(path.read_text()) if d]
        env = next(d for d in documents if d["kind"] == "ConfigMap")["data"]
        pod = next(
            d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"] == "sluice-server"
        )["spec"]["template"]["spec"]  # fmt: skip
        hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        return cls(
            float(hook.get("seconds", 0)), float(env["SLUICE_PRE_DRAIN"]), float(env["SLUICE_DRAIN_DEADLINE"]),
            float(pod["terminationGracePeriodSeconds"]), float(env["SLUICE_DRAIN_TIMEOUT"]),
        )  # fmt: skip

    def __str__(self) -> str:
        return (f"preStop {self.pre_stop:g}, pre-drain {self.pre_drain:g}, deadline {self.deadline:g}, "
                f"grace {self.grace:g}, pools' drain {self.drain_timeout:g} s")  # fmt: skip

    def scaled(self, factor: float) -> Times:
        # What a server may take beyond its deadline is fixed: it is not divided.
        fixed = 5.0
        grace = self.pre_stop + self.pre_drain + self.deadline
        return Times(
            self.pre_stop / factor, self.pre_drain / factor, self.deadline / factor, grace / factor + fixed,
            self.drain_timeout / factor,
        )  # fmt: skip


@dataclass
class Round:
    """What came of one round."""

    name: str
    answers: list[Answer]
    seconds: float
    killed: int = 0
    exits: int = 0
    tally: Counter[str] | None = None

    def row(self) -> list[str]:
        tally = self.tally or Counter()
        kinds = Counter(a.kind.partition("-")[0] for a in self.answers)
        waits = [a.wait for a in self.answers if a.kind != "json"]
        return [
            self.name, *(str(kinds[k]) for k in ("sse", "json", "ws")), *(str(tally[v]) for v in VERDICTS[1:]),
            str(self.killed), f"{max(waits, default=0):.2f}", f"{self.seconds:.0f}",
        ]  # fmt: skip


HEAD = ["round", "SSE", "JSON", "WebSocket", *VERDICTS[1:], "killed", "longest wait, s", "took, s"]


async def started(balancer: Process, socket: Path) -> None:
    """Wait until HAProxy takes commands.

    Raises:
        SystemExit: it has ended instead; with its last words.
    """
    await eventually(lambda: socket.exists() or not balancer.alive(), what="haproxy runs")
    if not balancer.alive():
        raise SystemExit(balancer.log().strip().splitlines()[-1])


class Rollout:
    """One deployment, its load balancer, and the updates of it."""

    def __init__(self, rig: Rig, times: Times, args: argparse.Namespace) -> None:
        self.rig = rig
        self.times = times
        self.args = args
        self.port = find_free_port()
        self.proxy = HAProxy(
            rig.folder, self.port, [f"slot{i} 127.0.0.1:1 disabled" for i in range(SLOTS)],
            inter=f"{max(100, int(2000 / args.scale))}ms",
        )  # fmt: skip
        self.free = list(range(SLOTS))
        self.servers: dict[int, Server] = {}
        self.pools: list[Process] = []
        self.killed = 0
        self.exits = 0

    async def start(self) -> Load:
        """Everything up, the load balancer sure of it, and the answers learnt."""
        self.pools = list(await asyncio.gather(self.rig.pool(), self.rig.pool()))
        balancer = Process(self.proxy.command, {}, self.rig.folder / "haproxy.log")
        self.rig._stack.callback(balancer.destroy)
        await started(balancer, self.rig.folder / "haproxy.sock")
        for _ in range(2):
            await self.add_server()
        load = Load(f"http://127.0.0.1:{self.port}", self.rig.key, CLIENTS, PROMPTS)
        await load.learn()
        return load

    async def add_server(self) -> None:
        """A new pod: its endpoint exists once it is ready."""
        slot = self.free.pop(0)
        server = await self.rig.server(**self.server_settings())
        name = f"servers/slot{slot}"
        await self.proxy.tell(
            f"set server {name} addr 127.0.0.1 port {server.port}", f"set server {name} state ready",
            f"set server {name} health up",
        )  # fmt: skip
        await eventually(lambda: self.proxy.up(f"slot{slot}"), what="the load balancer sees the new server")
        self.servers[slot] = server

    def server_settings(self) -> dict[str, str]:
        times, pre_drain = self.times, self.args.pre_drain
        return {
            "SLUICE_PRE_DRAIN": f"{times.pre_drain if pre_drain is None else pre_drain:g}",
            "SLUICE_DRAIN_DEADLINE": f"{times.deadline:g}",
            "SLUICE_TERMINATION_GRACE": f"{times.grace:g}",
        }

    async def remove_server(self, slot: int, *, endpoint: bool) -> None:
        """As the deletion of a pod: its endpoint goes late or by readiness alone, meanwhile the pod is stopped."""
        server = self.servers.pop(slot)
        name = f"servers/slot{slot}"

        async def remove_endpoint() -> None:
            if endpoint:
                await asyncio.sleep((self.times.pre_stop + self.times.pre_drain) * LATE)
                await self.proxy.tell(f"set server {name} state maint")

        removal = asyncio.create_task(remove_endpoint())
        await asyncio.sleep(self.times.pre_stop)
        await self._stop(server.process, self.times.grace - self.times.pre_stop)
        await removal
        if not endpoint:
            await self.proxy.tell(f"set server {name} state maint")
        self.free.append(slot)

    async def _stop(self, process: Process, seconds: float) -> None:
        process.signal(signal.SIGTERM)
        try:
            self.exits += await process.wait(seconds) != 0
        except AssertionError:
            self.killed += 1
            process.destroy()

    async def update_servers(self, *, endpoint: bool) -> None:
        for slot in list(self.servers):
            await self.add_server()
            await self.remove_server(slot, endpoint=endpoint)

    async def update_pools(self, *, hasty: bool) -> None:
        """A hasty pool hands back what it has not ended within a second, when it is replaced."""
        settings = {"SLUICE_DRAIN_TIMEOUT": "1"} if hasty else {}
        for old in list(self.pools):
            await self._stop(old, self.times.grace)
            self.pools.remove(old)
            self.pools.append(await self.rig.pool(**settings))

    async def round(self, load: Load, number: int) -> Round:
        """Replace everything once. The answers are those that ended meanwhile."""
        began, first = time.monotonic(), len(load.answers)
        killed, exits = self.killed, self.exits
        load.start()
        await asyncio.sleep(1.0)  # under steady load before anything changes
        await asyncio.gather(self.update_servers(endpoint=number % 2 == 1), self.update_pools(hasty=number % 2 == 1))
        await asyncio.sleep(1.0)
        await load.stop()
        answers = load.answers[first:]
        return Round(
            str(number), answers, time.monotonic() - began, self.killed - killed, self.exits - exits,
            load.tally(answers),
        )  # fmt: skip


def count_tracebacks(folder: Path) -> int:
    """In the logs of every process that has run."""
    return sum(path.read_text(errors="replace").count("Traceback") for path in folder.glob("*.log"))


async def afterwards(rig: Rig, load: Load, folder: Path) -> list[tuple[str, object, bool]]:
    """What the store says: everything that was asked for has ended once, and nothing else was run."""
    await eventually(rig.is_quiet, 20, what="nothing in flight")
    endings = [decode_ending(e) for e in await rig.redis.call("LRANGE", rig.store.keys.history, 0, -1)]
    times = Counter(e.id for e in endings)
    learnt = len(load.prompts) * len(set(load.kinds) | {"json", "ws"})
    asked = len(load.answers) + learnt
    report = await audit(rig.store)
    traces = count_tracebacks(folder)
    return [
        ("requests asked for and run", f"{asked} and {len(times)}", asked == len(times)),
        ("ended twice", sum(n > 1 for n in times.values()), all(n == 1 for n in times.values())),
        ("went on at another worker", sum(e.attempts > 1 for e in endings), True),
        ("tracebacks in the logs", traces, not traces),
        ("sockets that had to connect again between two requests", load.client.reconnects, True),
        ("records left, findings of the audit", f"{report.records}, {len(report.findings)}",
         report.clean and not report.records),
    ]  # fmt: skip


def report(rounds: list[Round], load: Load, checks: list[tuple[str, object, bool]]) -> bool:
    """Print everything; true where all is as promised."""
    total = Round("all", load.answers, sum(r.seconds for r in rounds), sum(r.killed for r in rounds),
                  tally=load.tally())  # fmt: skip
    print("\n" + table(HEAD, [r.row() for r in [*rounds, total]]) + "\n")
    print(table(["what", "value", ""], [[w, v, "ok" if good else "**WRONG**"] for w, v, good in checks]))
    for answer in load.answers:
        if (verdict := load.verdict(answer)) != "ok":
            print(
                f"{verdict}: {answer.kind} {answer.id or '(no id)'}: {answer.error} after {len(answer.text)} characters"
            )
    assert total.tally is not None
    clean = total.tally["ok"] == len(load.answers) > 0
    return clean and not total.killed and not any(r.exits for r in rounds) and all(good for *_, good in checks)


async def run(args: argparse.Namespace) -> bool:
    """The whole proof; true where every answer was whole."""
    manifest = Times.from_manifest()
    times = manifest.scaled(args.scale)
    print(f"{machine()}; {version()}")
    print(f"manifest: {manifest}; played: {times}; endpoints go after "
          f"{(times.pre_stop + times.pre_drain) * LATE:.1f} s", flush=True)  # fmt: skip
    settings = {
        "SLUICE_MODELS": f"scripted=scripted:rate={RATE},context=20000,slots=16",
        "SLUICE_HISTORY_SIZE": 1_000_000,
        "SLUICE_DRAIN_TIMEOUT": f"{times.drain_timeout:g}",
        "SLUICE_MAX_ATTEMPTS": 6,
    }
    with tempfile.TemporaryDirectory(prefix="sluice-rollout-") as folder:
        async with Rig(Path(folder), **settings) as rig:
            rollout = Rollout(rig, times, args)
            load = await rollout.start()
            rounds = []
            for number in range(1, args.rounds + 1):
                rounds.append(await rollout.round(load, number))
                print("  " + ", ".join(f"{h} {v}" for h, v in zip(HEAD, rounds[-1].row(), strict=True)), flush=True)
            checks = await afterwards(rig, load, Path(folder))
            await load.client.aclose()
            return report(rounds, load, checks)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``make prove-rollout``."""
    parser = argparse.ArgumentParser(prog="prove-rollout", description=__doc__, add_help=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=5.0, help="divide the manifest's times by this (default 5)")
    parser.add_argument("--pre-drain", type=float, help="seconds, instead of the manifest's; 0 has to fail")
    return 0 if asyncio.run(run(parser.parse_args(argv))) else 1


if __name__ == "__main__":
    sys.exit(main())
