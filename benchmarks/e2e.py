"""The default model through everything, beside other servers and the bare loop underneath.

    python -m benchmarks.e2e [--rounds 3] [--streams 1,4,16,32] [--dtype bfloat16] [--quick]

* ``sluice``        HTTP server, Redis, worker, engine: streamed chat completions, with a key
* ``transformers``  ``transformers serve --continuous-batching``, the same weights
* ``llama.cpp``     llama-cpp-python's server with a GGUF file of the same model (4 bits)
* ``bare loop``     transformers' continuous batching in one process, tokens thrown away

The servers take turns; each has the whole machine while it is measured, and answers the same questions,
which no prefix cache knows yet. The table has medians of the rounds: tokens/s over all streams, time to
the first token, time between two tokens. The mixes are eight streams: with 600 tokens in common, and with
2,000 tokens in every fourth prompt.

``SLUICE_UPSTREAM_PYTHON`` names the interpreter that has the other servers, ``SLUICE_UPSTREAM_GGUF`` the file
(``make test-upstream`` prepares both); what is not there is left out, and said so.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from benchmarks.bench_engine import prompts_of
from benchmarks.processes import free_port, machine, manage, running
from benchmarks.report import medians, plot, show
from benchmarks.rivals import Rival
from benchmarks.site import base
from benchmarks.stream import Target, measure
from inference.config import DEFAULT_MODEL, Config
from inference.models.registry import resolve_default

OTHERS = os.environ.get("SLUICE_UPSTREAM_PYTHON", sys.executable)
GGUF = os.environ.get("SLUICE_UPSTREAM_GGUF", "")
MIXED = 8
GREEDY = '{"temperature": 0}'
"""The bare loop is greedy, so that all are."""


@contextmanager
def sluice(args: argparse.Namespace) -> Iterator[Target]:
    port = free_port()
    settings = {"SLUICE_DTYPE": args.dtype, "SLUICE_MAX_RUNNING": "32"}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-"))
        env, key, _ = stack.enter_context(base(folder, f"real={args.model}", pin=False, **settings))
        pool = stack.enter_context(running(manage("runworker", "--devices", "cpu"), env=env))
        serve = manage("serve", "--port", str(port))
        server = stack.enter_context(running(serve, env=env, ready=f"http://127.0.0.1:{port}/readyz"))
        yield Target("sluice", port, server.pid, {"worker": pool.pid}, model="real", key=key, extra=GREEDY)


@contextmanager
def transformers(args: argparse.Namespace) -> Iterator[Target]:
    port = free_port()
    command = [OTHERS, "-m", "transformers.cli.transformers", "serve", args.model, "--continuous-batching",
               "--dtype", args.dtype, "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    with running(command, ready=f"http://127.0.0.1:{port}/health", patience=240) as process:
        yield Target("transformers", port, process.pid, model=args.model, extra=GREEDY)


@contextmanager
def llama(args: argparse.Namespace) -> Iterator[Target]:
    port = free_port()
    command = [OTHERS, "-m", "llama_cpp.server", "--model", GGUF, "--model_alias", "small", "--n_ctx", "4096",
               "--interrupt_requests", "false", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    with running(command, ready=f"http://127.0.0.1:{port}/v1/models", patience=120) as process:
        yield Target("llama.cpp", port, process.pid, model="small", extra=GREEDY)


def servers() -> dict[str, Callable[[argparse.Namespace], AbstractContextManager[Target]]]:
    """Those that are installed."""
    found: dict[str, Callable[[argparse.Namespace], AbstractContextManager[Target]]] = {"sluice": sluice}
    if has("transformers", "fastapi", "uvicorn"):
        found["transformers"] = transformers
    else:
        print("without transformers serve: transformers[serving] is not installed")
    if has("llama_cpp", "starlette_context") and GGUF:
        found["llama.cpp"] = llama
    else:
        print("without llama.cpp: llama-cpp-python[server] is not installed, or SLUICE_UPSTREAM_GGUF is not set")
    return found


def has(*names: str) -> bool:
    if sys.executable == OTHERS:
        return all(importlib.util.find_spec(name) for name in names)
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {names!r})))"
    return subprocess.run([OTHERS, "-c", code], timeout=60).returncode == 0


def bare(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The loop in a process of its own: tokens/s by number of sequences."""
    return asyncio.run(_bare(args))


async def _bare(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    rival, rates = Rival("bare", args.model, "cpu", Config(dtype=args.dtype, max_running=32)), {}
    await rival.run(prompts_of(40_000, 1, 99), 4)
    for count in args.streams:
        seconds, _ = await rival.run(prompts_of(40_000, count, 1), args.tokens)
        rates[str(count)] = {"rate": count * args.tokens / seconds}
    rival.close()
    return rates


def measure_all(target: Target, args: argparse.Namespace, salt: int) -> dict[str, dict[str, Any]]:
    """Every number of streams, then the mixes."""
    out = {}
    plans = [(str(c), c, "plain") for c in args.streams]
    plans += [(mix, MIXED, mix) for mix in ("shared", "long")] if args.mixes else []
    measure(target, 1, 4, 0.0, "--timed", "--mix", "plain", "--salt", "1")
    for number, (name, count, mix) in enumerate(plans):
        options = ("--timed", "--mix", mix, "--salt", str(salt + 1000 * number))
        out[name] = measure(target, count, args.tokens, 0.0, *options)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: the fetched model")
    parser.add_argument("--dtype", default="bfloat16", help="of all but llama.cpp")
    parser.add_argument("--streams", type=lambda t: [int(n) for n in t.split(",")], default=[1, 4, 16, 32])
    parser.add_argument("--tokens", type=int, default=48, help="per answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-mixes", dest="mixes", action="store_false")
    parser.add_argument("--plots", action="store_true", help="write docs/benchmarks/e2e*.svg")
    parser.add_argument("--quick", action="store_true", help="one round of few short answers")
    args = parser.parse_args()
    if args.model is None:
        args.model = resolve_default()
    if args.quick:
        args.rounds, args.streams, args.tokens = 1, [1, 4], 16
    print(machine())
    found = servers()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for round_ in range(args.rounds):
        for name, start in found.items():
            with start(args) as target:
                note(results, name, measure_all(target, args, 10_000 * (round_ + 1)))
        note(results, "bare loop", bare(args))
    report(results, args)


def note(results: dict[str, dict[str, list[dict[str, Any]]]], name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Keep what one turn measured, and say it at once: a run that is broken off has told something."""
    for plan, row in rows.items():
        results.setdefault(name, {}).setdefault(plan, []).append(row)
    rates = ", ".join(f"{plan}: {row['rate']:.0f}" for plan, row in rows.items())
    print(f"{name}, tokens/s by streams: {rates}", file=sys.stderr, flush=True)


def report(results: dict[str, dict[str, list[dict[str, Any]]]], args: argparse.Namespace) -> None:
    plans = [*map(str, args.streams), *(("shared", "long") if args.mixes else ())]
    m = {name: {plan: medians(rows) for plan, rows in by.items()} for name, by in results.items()}
    heads = [f"{p} streams" if p.isdigit() else f"{MIXED}, {p}" for p in plans]
    kinds = {
        "rate": "tokens/s",
        "ttft_p50_ms": "time to the first token, p50, ms",
        "itl_p50_ms": "between tokens, p50, ms",
    }
    for key, title in kinds.items():
        rows = []
        for name, by in m.items():
            cells = [f"{by[p][key]:.0f}" if key in by.get(p, {}) else "" for p in plans]
            if any(cells):
                rows.append([name, *cells])
        if key == "rate":
            rows.append(["sluice / bare loop", *(ratio(results, p) for p in plans)])
        show(f"{DEFAULT_MODEL}, {args.dtype}: {title} (median of {args.rounds})", ["", *heads], rows)
    if args.plots:
        counts = [str(c) for c in args.streams]
        rates = {name: [(int(c), by[c]["rate"]) for c in counts] for name, by in m.items()}
        firsts = {n: [(int(c), by[c]["ttft_p50_ms"]) for c in counts] for n, by in m.items() if n != "bare loop"}
        plot("e2e", "Real model: tokens/s by streams", "streams", "tokens/s", rates, log_x=True)
        plot("e2e-ttft", "Real model: time to the first token, p50", "streams", "ms", firsts, log_x=True)


def ratio(results: dict[str, dict[str, list[dict[str, Any]]]], plan: str) -> str:
    """Ours to the bare loop's, round by round; empty where that has no such figure."""
    pairs = zip(results["sluice"][plan], results["bare loop"].get(plan, []), strict=False)
    values = [ours["rate"] / bare_["rate"] for ours, bare_ in pairs]
    return f"{statistics.median(values):.2f}" if values else ""


if __name__ == "__main__":
    main()
