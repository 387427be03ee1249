"""What Redis needs per 1,000 streams: memory, commands, traffic and processor time.

    python -m benchmarks.redis_size [--streams 200] [--rate 25] [--tokens 500]

The streams run at the pace of a model through the whole platform (scripted engine); Redis is asked about
itself before them and shortly before their end, when the token logs are longest. What grows with the streams
is scaled to 1,000.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from typing import Any

from benchmarks.processes import ROOT, machine, python
from benchmarks.site import Site, site


def run(live: Site, streams: int, rate: float, tokens: int) -> dict[str, float]:
    """One run; figures per 1,000 streams."""
    before = live.info()
    client = subprocess.Popen(
        python("-m", "benchmarks.load", "--port", str(live.port), "--streams", str(streams), "--tokens", str(tokens),
               "--model", "m", "--key", live.key, "--extra", '{"ignore_eos": true}'),
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds = tokens / rate
    time.sleep(seconds * 0.3)
    first, at = live.info(), time.monotonic()
    time.sleep(seconds * 0.6)
    last, spent = live.info(), time.monotonic() - at
    out, _ = client.communicate(timeout=seconds + 60)
    told = json.loads(out)
    if client.returncode or told["failed"]:
        raise SystemExit(f"{told.get('failed')} of {streams} streams failed")
    share = 1000 / streams

    def per_second(name: str) -> float:
        return (last[name] - first[name]) / spent * share

    return {
        "memory": (last["used_memory"] - before["used_memory"]) / 2**20 * share,
        "commands": per_second("total_commands_processed"),
        "in": per_second("total_net_input_bytes") / 2**20,
        "out": per_second("total_net_output_bytes") / 2**20,
        "cpu": per_second("cpu") * 100,
        "connections": float(last["connected_clients"]),
        "behind": told["seconds"] / seconds,
    }


def report(found: dict[str, float], args: Any) -> None:
    print(f"{args.streams} streams of {args.rate:g} tokens/s, {args.tokens} tokens each; per 1,000 streams:\n")
    print("| Redis, per 1,000 streams | |\n|---|---|")
    print(f"| memory at {int(args.tokens * 0.9)} tokens per stream, MiB | {found['memory']:.1f} |")
    print(f"| commands per second, those inside scripts included | {found['commands']:,.0f} |")
    print(f"| network in / out, MiB/s | {found['in']:.2f} / {found['out']:.2f} |")
    print(f"| processor time, % of one core | {found['cpu']:.0f} |")
    print(f"\nconnections of one server and one pool: {found['connections']:.0f}; "
          f"the streams took {found['behind']:.2f} times their nominal time")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=25.0)
    parser.add_argument("--tokens", type=int, default=500)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="sluice-redis-") as folder:
        models = f"m=scripted:rate={args.rate:g},slots=1024,context=20000"
        with site(folder, models) as live:
            run(live, 20, args.rate, 50)
            report(run(live, args.streams, args.rate, args.tokens), args)


if __name__ == "__main__":
    main()
