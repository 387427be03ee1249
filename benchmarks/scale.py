"""How what a token costs grows: with open streams, processes, requests in flight, and the prompt.

    python -m benchmarks.scale [--rounds 3] [--plots] [--quick]

The scripted engine, the whole path. A straight line or better is wanted: what a token costs must not
depend on what else is open. Processor time is per token, over all processes of a kind; nothing is
pinned, so that more processes can use what the machine has.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

from benchmarks.processes import free_port, machine, manage, running
from benchmarks.report import medians, plot, show
from benchmarks.site import base
from benchmarks.stream import Target, late, measure
from inference.config import Config
from inference.gateway import Gateway, RequestSpec
from inference.messages import Job, SamplingParams

MODELS = "m=scripted:rate={rate:g},slots=4096,context=16384,say=1 parked=scripted:rate=0.001,slots=1"
TOGETHER = {"SLUICE_MAX_QUEUED": "50000", "SLUICE_QUEUE_TIMEOUT": "3600"}


@contextmanager
def running_site(rate: float, folder: str, processes: int = 1) -> Iterator[tuple[Target, dict[str, str]]]:
    """Our processes, and their environment."""
    port = free_port()
    with ExitStack() as stack:
        env, key, valkey = stack.enter_context(base(folder, MODELS.format(rate=rate), pin=False, **TOGETHER))
        workers = manage("runworker", "--devices", "cpu", "--workers-per-device", str(processes))
        serve = manage("serve", "--port", str(port), "--processes", str(processes))
        pool = stack.enter_context(running(workers, env=env))
        server = stack.enter_context(running(serve, env=env, ready=f"http://127.0.0.1:{port}/readyz"))
        others = {"worker": pool.pid, "redis": valkey}
        yield Target("sluice", port, server.pid, others, key=key, extra='{"ignore_eos": true}'), env


WHO = ("server", "worker", "redis")


def costs(m: dict[str, float]) -> list[str]:
    return [f"{m[f'cpu_{who}']:.1f}" for who in WHO]


def by_streams(args: argparse.Namespace, folder: str) -> None:
    """Open streams that all run at five tokens a second; what a request costs besides is in it."""
    rows, lines, memory = [], {who: [] for who in WHO}, []
    with running_site(5, folder) as (target, _):
        for count in args.streams:
            m = medians([measure(target, count, args.tokens, 0.2) for _ in range(args.rounds)])
            rows.append([count, *costs(m), late(m), f"{m['rss']:.0f}"])
            for who in WHO:
                lines[who].append((count, m[f"cpu_{who}"]))
            memory.append((count, m["rss"]))
    head = ["open streams", "server, us/token", "worker", "Redis", "added latency p50 / p99, ms", "server RSS, MiB"]
    show(f"Open streams, each at 5 tokens/s, answers of {args.tokens} tokens", head, rows)
    if args.plots:
        title = "Processor time per token by open streams"
        plot("scale-streams", title, "open streams", "microseconds per token", lines)
        plot("scale-memory", "Memory of the server by open streams", "open streams", "MiB", {"server": memory})


def by_processes(args: argparse.Namespace, folder: str) -> None:
    """Servers and workers, as many of each, flat out."""
    rows, rates = [], []
    for count in args.processes:
        with running_site(0, folder, count) as (target, _):
            measure(target, 64, 50)
            m = medians([measure(target, 64, args.flat) for _ in range(args.rounds)])
        rows.append([count, f"{m['rate'] / 1000:.1f} k", *costs(m)])
        rates.append((count, sum(m[f"cpu_{who}"] for who in WHO)))
    show(
        "Servers and workers, 64 streams flat out", ["of each", "tokens/s", "server, us/token", "worker", "Redis"], rows
    )
    if args.plots:
        title = "Processor time per token by processes"
        plot("scale-processes", title, "servers and workers", "us per token", {"all": rates})


async def park(gateway: Gateway, stack: AsyncExitStack, first: int, count: int) -> None:
    """Open requests that nobody will ever claim."""

    async def one(number: int) -> None:
        job = Job(f"parked-{number}", "parked", [1, 2, 3], SamplingParams(max_tokens=8))
        spec = RequestSpec(job=job, endpoint="chat", transport="sse", owner="key:bench", timeout=3600.0)
        await stack.enter_async_context(gateway.request(spec))

    for start in range(first, count, 500):
        await asyncio.gather(*(one(n) for n in range(start, min(start + 500, count))))


async def by_records(args: argparse.Namespace, folder: str) -> None:
    """A stream's cost while others wait; and what operators' views cost then."""
    rows, lines = [], {who: [] for who in WHO}
    with running_site(0, folder) as (target, env):
        os.environ.update(env)
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(Gateway(Config.from_env()))
            before = 0
            for count in args.records:
                await park(gateway, stack, before, count)
                before = count
                runs = [await asyncio.to_thread(measure, target, 64, args.flat) for _ in range(args.rounds)]
                timed = ["--timed"]
                firsts = [await asyncio.to_thread(measure, target, 1, 20, 0.0, *timed) for _ in range(args.rounds)]
                took = []
                for _ in range(args.rounds):
                    began = time.perf_counter()
                    await gateway.list(0, 50)
                    took.append((time.perf_counter() - began) * 1000)
                m, first = medians(runs), medians(firsts)["ttft_p50_ms"]
                page = sorted(took)[len(took) // 2]
                rows.append([count, f"{m['rate'] / 1000:.1f} k", *costs(m), f"{first:.1f}", f"{page:.1f}"])
                for who in WHO:
                    lines[who].append((count, m[f"cpu_{who}"]))
    head = ["in flight beside", "tokens/s", "server, us/token", "worker", "Redis", "first token, ms", "page of 50, ms"]
    show("Requests in flight beside 64 streams flat out", head, rows)
    if args.plots:
        title = "Processor time per token by requests in flight"
        plot("scale-records", title, "requests in flight", "us per token", lines)


def by_prompt(args: argparse.Namespace, folder: str) -> None:
    """Time to the first token of a model that needs none for a prompt: reading, tokenizing, queueing, Redis."""
    rows, lines = [], []
    with running_site(0, folder) as (target, _):
        for size in args.prompts:
            options = ("--timed", "--mix", "plain", "--prompt-bytes", str(size))
            runs = [measure(target, 1, 8, 0.0, *options) for _ in range(2 * args.rounds + 1)]
            m: dict[str, Any] = medians(runs[1:])
            rows.append([size, f"{m['ttft_p50_ms']:.1f}"])
            lines.append((size, m["ttft_p50_ms"]))
    show("Prompt length", ["tokens of the prompt", "first token, ms"], rows)
    if args.plots:
        title = "Time to the first token by prompt length"
        plot("scale-prompt", title, "tokens of the prompt", "ms", {"sluice": lines})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--streams", type=numbers, default=[16, 128, 512, 1000, 2000])
    parser.add_argument("--processes", type=numbers, default=[1, 2, 4])
    parser.add_argument("--records", type=numbers, default=[0, 1000, 5000, 10_000, 20_000])
    parser.add_argument("--prompts", type=numbers, default=[16, 1000, 4000, 8000, 15_000])
    parser.add_argument("--tokens", type=int, default=40, help="per paced stream")
    parser.add_argument("--flat", type=int, default=800, help="per stream flat out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plots", action="store_true", help="write docs/benchmarks/scale-*.svg")
    parser.add_argument("--quick", action="store_true", help="one round of small numbers")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.flat = 1, 8, 100
        args.streams, args.processes, args.records, args.prompts = [16, 200], [1, 2], [0, 500], [16, 4000]
    print(machine())
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        by_streams(args, folder)
        by_processes(args, folder)
        asyncio.run(by_records(args, folder))
        by_prompt(args, folder)


if __name__ == "__main__":
    main()
