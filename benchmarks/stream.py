"""What the platform itself costs per token, beside servers that do nothing but stream.

    python -m benchmarks.stream [--streams 1,32,128,512] [--rounds 3] [--quick]

``sluice`` is the whole path: scripted engine in its worker process -> Redis -> server -> client, with keys,
validation, limits and settling; also over WebSocket, and the same application under uvicorn. The others
make the same chunks in a loop inside the server. Every server is pinned to one processor; client, worker
and Redis share the other. Servers alternate in each round; the table shows medians, and ratios to bare
uvicorn in the same run. "Flat out" counts tokens: where our server is behind, several tokens of a stream
leave in one write, as they do for the peers whose sockets are full.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers import WORD
from benchmarks.processes import ROOT, cpu_seconds, family, free_port, machine, manage, python, resident_mib, running
from benchmarks.report import medians, plot, show
from benchmarks.site import base

SAID = "pace "
"""What paced streams of ours repeat: a token is a byte of it, and every token can be seen on its way."""
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
    ws: bool = False


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


OURS = {
    "sluice": "serve",
    "sluice, WebSocket": "serve",
    "sluice under uvicorn": "uvicorn",
}


@contextmanager
def sluice(rate: float, folder: str, name: str = "sluice") -> Iterator[Target]:
    """Our server, pool and Valkey, with the scripted engine at ``rate`` tokens per second."""
    port = free_port()
    serve = {
        "serve": manage("serve", "--port", str(port)),
        "uvicorn": python("-m", "uvicorn", "sluice.asgi:application", "--port", str(port), "--log-level", "error"),
    }[OURS[name]]
    with ExitStack() as stack:
        env, key, valkey = stack.enter_context(base(folder, f"m=scripted:rate={rate:g},slots=1024,context=8192,say=1"))
        pool = stack.enter_context(running(manage("runworker", "--devices", "cpu"), env=env, cpu=1))
        server = stack.enter_context(running(serve, env=env, cpu=0, ready=f"http://127.0.0.1:{port}/readyz"))
        others = {"worker": pool.pid, "redis": valkey}
        yield Target(name, port, server.pid, others, key=key, extra='{"ignore_eos": true}', ws="WebSocket" in name)


def measure(target: Target, streams: int, tokens: int, interval: float = 0.0, *options: str) -> dict[str, Any]:
    """One run of the client; adds processor time per 1,000 tokens (ms) and memory (MiB)."""
    groups = {"server": family(target.server)} | {n: family(p) for n, p in target.others.items()}
    before = {name: cpu_seconds(pids) for name, pids in groups.items()}
    extra = json.loads(target.extra)
    if interval and target.others:
        options = ("--ask", f"[[say:{SAID}]]", "--width", "1", *options)
    elif interval:
        extra["rate"] = 1 / interval
        options = ("--width", str(len(WORD)), *options)
    command = python(
        "-m", "benchmarks.load", "--port", str(target.port), "--streams", str(streams), "--tokens", str(tokens),
        "--model", target.model, "--key", target.key, "--extra", json.dumps(extra), "--interval", str(interval),
        *(["--ws"] if target.ws else []), *options,
    )  # fmt: skip
    done = subprocess.run(["taskset", "-c", "1", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    if result["failed"] > streams / 5:
        raise SystemExit(f"{target.name}: {result['failed']} of {streams} streams failed")
    if result["failed"]:
        print(f"{target.name}: {result['failed']} of {streams} streams failed; the others count", flush=True)
    result["rate"] = result["tokens"] / result["seconds"]
    for name, pids in groups.items():
        result[f"cpu_{name}"] = (cpu_seconds(pids) - before[name]) * 1e6 / result["tokens"]
    result["rss"] = resident_mib(groups["server"])
    return result


def late(m: dict[str, float]) -> str:
    """Added latency p50 / p99, ms; nothing where the answers ended before all streams ran."""
    return f"{m['late_p50_ms']:.0f} / {m['late_p99_ms']:.0f}" if "late_p50_ms" in m else ""


def targets(rate: float, folder: str, names: list[str]) -> dict[str, Any]:
    made = {n: (lambda n=n: peer(n, PEERS[n])) for n in PEERS if n in names}
    return made | {n: (lambda n=n: sluice(rate, folder, n)) for n in OURS if n in names}


def flat_out(args: argparse.Namespace, folder: str) -> None:
    counts = [int(n) for n in args.streams.split(",")]
    results: dict[str, dict[int, list[dict[str, Any]]]] = {}
    with ExitStack() as stack:
        live = {n: stack.enter_context(make()) for n, make in targets(0, folder, args.only).items()}
        for count in counts:
            tokens = max(200, min(2000, args.budget // count))
            for _ in range(args.rounds):
                for name, target in live.items():
                    results.setdefault(name, {}).setdefault(count, []).append(measure(target, count, tokens))
    rates = {name: {c: medians(rows)["rate"] for c, rows in by.items()} for name, by in results.items()}
    base = rates.get("bare uvicorn", {})
    cells = {
        name: [f"{by[c] / 1000:.1f} k" + (f" ({by[c] / base[c]:.2f})" if base else "") for c in counts]
        for name, by in rates.items()
    }
    show(
        f"Flat out, tokens/s (median of {args.rounds}) and ratio to bare uvicorn",
        ["server", *(f"{c} streams" for c in counts)],
        [[name, *row] for name, row in cells.items()],
    )
    ours = [(c, medians(results["sluice"][c])) for c in counts] if "sluice" in results else []
    if ours:
        show(
            "sluice, flat out: microseconds of processor time per token, and bytes per token",
            ["streams", "server", "worker", "Redis", "bytes"],
            [
                [
                    c,
                    *(f"{m[f'cpu_{who}']:.1f}" for who in ("server", "worker", "redis")),
                    f"{m['bytes'] / m['tokens']:.0f}",
                ]
                for c, m in ours
            ],
        )
    if args.plots:
        chosen = {
            name: [(c, by[c]) for c in counts] for name, by in rates.items() if "uvicorn" not in name or by is base
        }
        plot("stream", "Tokens/s by open streams, flat out", "open streams", "tokens/s", chosen, log_x=True)


def paced(args: argparse.Namespace, folder: str) -> None:
    rows = []
    for name, make in targets(PACE, folder, args.only).items():
        with make() as target:
            measure(target, 64, 20, 1 / PACE)  # warms up
            m = medians([measure(target, args.paced, args.paced_tokens, 1 / PACE) for _ in range(args.rounds)])
        parts = [f"{m[f'cpu_{who}']:.0f}" if f"cpu_{who}" in m else "" for who in ("server", "worker", "redis")]
        rows.append(
            [
                name,
                *parts,
                late(m),
                f"{m.get('accepted_s', 0):.1f}",
                f"{m['rss']:.0f}",
            ]
        )
    show(
        f"Paced, {args.paced} streams, one token per 30 ms (median of {args.rounds}); CPU in ms per 1,000 tokens",
        ["server", "CPU server", "worker", "Redis", "added latency p50 / p99, ms", "all accepted after, s", "RSS, MiB"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,32,128,512")
    parser.add_argument("--paced", type=int, default=512)
    parser.add_argument("--paced-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=60_000, help="tokens per measurement, over all streams")
    parser.add_argument("--only", type=lambda t: t.split("+"), default=[*PEERS, *OURS], help="names, with + between")
    parser.add_argument("--skip-paced", action="store_true")
    parser.add_argument("--plots", action="store_true", help="write docs/benchmarks/stream.svg")
    parser.add_argument("--quick", action="store_true", help="one round of few streams")
    args = parser.parse_args()
    if args.quick:
        args.streams, args.rounds, args.paced, args.paced_tokens = "1,32", 1, 64, 60
    print(machine())
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        flat_out(args, folder)
        if not args.skip_paced:
            paced(args, folder)


if __name__ == "__main__":
    main()
