"""How long everything takes to start, and what it uses while nothing happens.

    python -m benchmarks.start [--rounds 3] [--seconds 20] [--quick]

``manage.py up`` as ``make serve`` calls it - Valkey, a worker, a server - with files that the system has
in memory already: to ready, to the first token of the first request, then processor time and memory
of all its processes over some idle seconds. Once with the scripted engine, once with the default model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from benchmarks.processes import cpu_seconds, family, first_key, free_port, machine, manage, resident_mib, running
from benchmarks.report import medians, show
from benchmarks.stream import Target, measure
from inference.config import DEFAULT_MODEL
from inference.errors import ModelUnavailable
from inference.models.registry import resolve_default

SETTLE = 5.0
"""Seconds after the first answer before the idle time begins."""


def once(models: str, alias: str, seconds: float) -> dict[str, Any]:
    """One start, one answer, one idle time."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        env = {
            "SLUICE_VAR_DIR": folder, "SLUICE_MODELS": models, "SLUICE_LOG_LEVEL": "WARNING", "SLUICE_DEBUG": "0",
        }  # fmt: skip
        key = first_key(env)
        began = time.perf_counter()
        with running(manage("up", "--port", str(port)), env=env, ready=f"http://127.0.0.1:{port}/readyz") as process:
            ready = time.perf_counter() - began
            target = Target("sluice", port, process.pid, model=alias, key=key)
            answer = measure(target, 1, 8, 0.0, "--timed", "--mix", "plain")
            time.sleep(SETTLE)
            pids = family(process.pid)
            before = cpu_seconds(pids)
            time.sleep(seconds)
            used = (cpu_seconds(pids) - before) / seconds
            return {
                "ready": ready,
                "first": ready + answer["ttft_p50_ms"] / 1000,
                "idle": used * 100,
                "rss": resident_mib(pids),
                "processes": len(pids),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: the fetched model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="one round, five idle seconds")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 5.0
    print(machine())
    kinds = {"scripted": ("m=scripted:default", "m")}
    try:
        folder = args.model or resolve_default()
        kinds[DEFAULT_MODEL] = (f"real={folder}", "real")
    except ModelUnavailable as exc:
        print(f"without the default model: {exc}")
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for name, (models, alias) in kinds.items():
            results.setdefault(name, []).append(once(models, alias, args.seconds))
    rows = []
    for name, runs in results.items():
        m = medians(runs)
        rows.append(
            [name, f"{m['ready']:.1f}", f"{m['first']:.1f}", f"{m['idle']:.2f}", f"{m['rss']:.0f}", int(m["processes"])]
        )
    head = ["model", "ready, s", "first token, s", "idle, % of a core", "RSS, MiB", "processes"]
    show(f"Start, and idle for {args.seconds:.0f} s (median of {args.rounds})", head, rows)


if __name__ == "__main__":
    main()
