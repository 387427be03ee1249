"""What the platform itself costs per token, beside servers that do nothing but stream.

    python -m benchmarks.stream [--streams 1,32,128,512] [--rounds 3]

``sluice`` is the whole path: scripted engine in its worker process -> Redis -> server -> client, with keys,
validation, limits and settling. The others make the same chunks in a loop inside the server. Every server
is pinned to one processor; client, worker and Redis share the other. Servers alternate in each round; the
table shows medians, and ratios to bare uvicorn in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import ROOT, cpu_seconds, family, free_port, machine, python, resident_mib, running
from inference.embedded import EmbeddedValkey

PACE = 1 / 0.03
"""Tokens per second of a paced stream."""


@dataclass
class Target:
    """A server under load and the processes behind it."""

    name: str
    port: int
    server: int
    others: dict[str, int] = field(default_factory=dict)
    model: str = "m"
    key: str = "none"
    extra: str = "{}"


@contextmanager
def peer(name: str, command: list[str]) -> Iterator[Target]:
    port = free_port()
    filled = [part.replace("PORT", str(port)) for part in command]
    with running(python("-m", *filled), cpu=0, ready=f"http://127.0.0.1:{port}/none", below=600) as process:
        yield Target(name, port, process.pid)


PEERS = {
    "bare uvicorn": ["uvicorn", "benchmarks.peers:bare", "--port", "PORT", "--log-level", "error"],
    "FastAPI on uvicorn": ["uvicorn", "benchmarks.peers:fastapi", "--port", "PORT", "--log-level", "error"],
    "bare Daphne": ["daphne", "-p", "PORT", "-v", "0", "benchmarks.peers:bare"],
    "Daphne + plain Channels consumer": ["daphne", "-p", "PORT", "-v", "0", "benchmarks.peers:channels"],
}


@contextmanager
def sluice(rate: float, folder: str) -> Iterator[Target]:
    """Our servers, pools and Valkey, with the scripted engine at ``rate`` tokens per second."""
    port = free_port()
    with ExitStack() as stack:
        valkey = stack.enter_context(EmbeddedValkey())
        os.sched_setaffinity(valkey.pid, {1})
        env = {
            "REDIS_URL": valkey.url,
            "DATABASE_URL": f"sqlite:///{folder}/bench.sqlite3",
            "SLUICE_MODELS": f"m=scripted:rate={rate:g},slots=1024,context=8192",
            "SLUICE_MAX_RUNNING": "1024",
            "SLUICE_MAX_QUEUED": "4096",
            "SLUICE_LOG_LEVEL": "WARNING",
        }
        run = {**os.environ, **env, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
        subprocess.run(python("manage.py", "migrate", "--noinput", "-v", "0"), cwd=ROOT, env=run, check=True)
        made = subprocess.run(
            python("manage.py", "apikey", "create", "bench"),
            cwd=ROOT,
            env=run,
            check=True,
            capture_output=True,
            text=True,
        )
        key = next(word for word in made.stdout.split() if word.startswith("sk-"))
        pool = stack.enter_context(running(python("manage.py", "runworker", "--devices", "cpu"), env=env, cpu=1))
        server = stack.enter_context(
            running(
                python("manage.py", "serve", "--port", str(port)),
                env=env,
                cpu=0,
                ready=f"http://127.0.0.1:{port}/readyz",
            )
        )
        yield Target(
            "sluice", port, server.pid, {"worker": pool.pid, "redis": valkey.pid}, key=key, extra='{"ignore_eos": true}'
        )


def measure(target: Target, streams: int, tokens: int, interval: float = 0.0) -> dict[str, Any]:
    """One run of the client; adds processor time per 1,000 tokens and memory."""
    groups = {"server": family(target.server)} | {n: family(p) for n, p in target.others.items()}
    before = {name: cpu_seconds(pids) for name, pids in groups.items()}
    extra = json.loads(target.extra)
    if interval and target.name != "sluice":
        extra["rate"] = 1 / interval
    command = python(
        "-m", "benchmarks.load", "--port", str(target.port), "--streams", str(streams), "--tokens", str(tokens),
        "--model", target.model, "--key", target.key, "--extra", json.dumps(extra), "--interval", str(interval),
    )  # fmt: skip
    done = subprocess.run(["taskset", "-c", "1", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    if result["failed"]:
        raise SystemExit(f"{target.name}: {result['failed']} of {streams} streams failed")
    result["rate"] = result["tokens"] / result["seconds"]
    for name, pids in groups.items():
        result[f"cpu_{name}"] = (cpu_seconds(pids) - before[name]) * 1e6 / result["tokens"]
    result["rss"] = resident_mib(groups["server"])
    return result


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {k: statistics.median(r[k] for r in rows) for k in rows[0] if isinstance(rows[0][k], (int, float))}


def targets(rate: float, folder: str, names: list[str]) -> dict[str, Any]:
    made = {n: (lambda n=n: peer(n, PEERS[n])) for n in PEERS if n in names}
    if "sluice" in names:
        made["sluice"] = lambda: sluice(rate, folder)
    return made


def flat_out(args: argparse.Namespace, folder: str) -> None:
    counts = [int(n) for n in args.streams.split(",")]
    results: dict[str, dict[int, list[dict[str, Any]]]] = {}
    with ExitStack() as stack:
        live = {n: stack.enter_context(make()) for n, make in targets(0, folder, args.only).items()}
        for count in counts:
            tokens = max(60, min(2000, args.budget // count))
            for _ in range(args.rounds):
                for name, target in live.items():
                    results.setdefault(name, {}).setdefault(count, []).append(measure(target, count, tokens))
    print(f"\nFlat out, tokens/s (median of {args.rounds}) and ratio to bare uvicorn\n")
    print(f"| {'server':34} | " + " | ".join(f"{c:>5} streams" for c in counts) + " |")
    print("|---" * (len(counts) + 1) + "|")
    base = results.get("bare uvicorn", {})
    for name, by_count in results.items():
        cells = []
        for count in counts:
            rate = medians(by_count[count])["rate"]
            ratio = rate / medians(base[count])["rate"] if base else float("nan")
            cells.append(f"{rate / 1000:6.1f} k ({ratio:.2f})")
        print(f"| {name:34} | " + " | ".join(cells) + " |")
    ours = results.get("sluice", {}).get(counts[-1])
    if ours:
        m = medians(ours)
        print(
            f"\nsluice at {counts[-1]} streams, us of processor time per token: server {m['cpu_server']:.1f}, "
            f"worker {m['cpu_worker']:.1f}, Redis {m['cpu_redis']:.1f}; bytes per token {m['bytes'] / m['tokens']:.0f}"
        )


def paced(args: argparse.Namespace, folder: str) -> None:
    tokens = 200
    print(f"\nPaced, {args.paced} streams, one token per 30 ms (median of {args.rounds})\n")
    print("| server | CPU ms per 1,000 tokens | added latency p50 / p99, ms | RSS, MiB |\n|---|---|---|---|")
    for name, make in targets(PACE, folder, args.only).items():
        with make() as target:
            rows = [measure(target, args.paced, tokens, 1 / PACE) for _ in range(args.rounds)]
        m = medians(rows)
        print(
            f"| {name} | {m['cpu_server']:.0f} | {m['late_p50_ms']:.0f} / {m['late_p99_ms']:.0f} | {m['rss']:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,32,128,512")
    parser.add_argument("--paced", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=60_000, help="tokens per measurement, over all streams")
    parser.add_argument("--only", type=lambda t: t.split(","), default=[*PEERS, "sluice"])
    parser.add_argument("--skip-paced", action="store_true")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        flat_out(args, folder)
        if not args.skip_paced:
            paced(args, folder)


if __name__ == "__main__":
    main()
