"""Tokens per second of a worker against the loop its engine is built on and against static batches.

Same weights, same lengths, measured in alternating rounds, each in a process of its own (``rivals.py``);
printed as a table of medians and ratios::

    python -m benchmarks.bench_engine [--quick] [--model DIR] [--device cpu] [--dtype float32]

* ``bare``, ``static``  the loop underneath, and ``model.generate`` on one batch
* ``engine``  a worker as the pool runs it: claims from Valkey, admission, sampler, detokenisation,
  frames to Valkey, where a process in the server's place receives them; a run is over when that
  process has the last frame

The last column compares processor time, which other load on the machine hardly moves.

Then the same worker with sampling (temperature, top-p, seed), and the time to the first token of a
second prompt that shares a 600-token prefix with the first, at the receiving process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import torch

from benchmarks.receiver import Receiver
from benchmarks.rivals import Rival
from inference.config import Config, ModelSpec
from inference.embedded import EmbeddedValkey
from inference.engine.factory import make_tokenizer
from inference.engine.transformers import TransformersEngine
from inference.messages import Job, SamplingParams
from inference.models.registry import resolve_default
from inference.store.records import Submission
from inference.worker.heartbeat import Served
from inference.worker.worker import Worker

CONCURRENCY = (1, 8, 32)
PROMPT_TOKENS = 48
WARM_UP = 16
"""Tokens per answer in the first round, which is not counted."""


SERVER = "bench"
"""Name of the server whose place the receiving process takes."""


class Ours:
    """A worker with our engine, and what it needs around it."""

    def __init__(self, folder: str, device: str, config: Config) -> None:
        self.valkey = EmbeddedValkey()
        # No poll comes in between: what is measured is the way that work usually takes.
        changes = {"redis_url": self.valkey.start(), "check_interval": 3600.0}
        self.config = config = msgspec.structs.replace(config, **changes)
        self.engine = TransformersEngine(folder, alias="bench", device=device, config=config)
        self.tokenizer = make_tokenizer(ModelSpec("bench", "transformers", folder), config)
        self.worker = Worker(
            "w-bench", config, pool="p-bench", device=device, aliases=["bench"], on_beat=lambda: None, on_fatal=_die
        )
        self.receiver = Receiver(config.redis_url, self.worker.store.keys.server_channel(SERVER))
        self.numbers = 0

    async def load(self) -> float:
        started = time.perf_counter()
        await self.receiver.start()
        await self.worker.start()
        info = await self.engine.load(self.worker.sink("bench"), _die)
        await self.worker.serve({"bench": Served(self.engine, info, self.tokenizer)})
        return time.perf_counter() - started

    async def run(self, prompts: Sequence[list[int]], length: int, **params: Any) -> list[str]:
        """Submit all, wait until the receiver has the last frame of each; their names."""
        names = []
        for prompt in prompts:
            self.numbers += 1
            names.append(f"r{self.numbers}")
            merged: dict[str, Any] = {"temperature": 0.0, "seed": self.numbers, **params}
            job = Job(names[-1], "bench", prompt, SamplingParams(max_tokens=length, ignore_eos=True, **merged))
            spec = Submission(job, endpoint="bench", transport="sse", owner="bench")
            await self.worker.store.submit(spec, server=SERVER, slots=self.config.max_running)
        await self.receiver.all_ended(names)
        return names

    async def first_token_after(self, prompt: list[int]) -> float:
        started = time.monotonic()
        (name,) = await self.run([prompt], 2)  # the library caches nothing of a step that ends its request
        return self.receiver.began[name] - started

    async def close(self) -> None:
        await self.worker.stop()
        await self.receiver.stop()
        self.valkey.stop()


def _die(error: BaseException) -> None:
    raise SystemExit(f"the worker died: {error}")


def prompts_of(vocabulary: int, count: int, round_: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Distinct prompts, so that no prefix is shared by accident."""
    generator = torch.Generator().manual_seed(1000 * round_ + count)
    return torch.randint(100, vocabulary - 100, (count, length), generator=generator).tolist()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = Config(dtype=options.dtype, max_running=max(options.concurrent), cache_tokens=options.cache_tokens)
    ours = Ours(options.model, options.device, config)
    report: dict[str, Any] = {"load_seconds": round(await ours.load(), 2), "threads": torch.get_num_threads()}
    engine = ours.engine
    bare, static = (Rival(kind, options.model, options.device, config) for kind in ("bare", "static"))
    report["dtype"] = str(engine._loaded.model.dtype).removeprefix("torch.")
    vocabulary = engine._loaded.vocab_size

    async def timed(prompts: list[list[int]], length: int, **params: float) -> tuple[float, float]:
        started, worked = time.perf_counter(), time.process_time()
        await ours.run(prompts, length, **params)
        return time.perf_counter() - started, time.process_time() - worked

    rows: list[dict[str, Any]] = []
    for count in options.concurrent:
        rates: dict[str, list[float]] = {"bare": [], "engine": [], "sampled": [], "static": []}
        work: dict[str, list[float]] = {name: [] for name in rates}
        for round_ in range(options.rounds + 1):
            p = [prompts_of(vocabulary, count, 10 * round_ + i) for i in range(4)]
            length = options.length if round_ else WARM_UP
            runs: dict[str, Callable[[], Awaitable[tuple[float, float]]]] = {
                "bare": lambda p=p, length=length: bare.run(p[0], length),
                "engine": lambda p=p, length=length: timed(p[1], length),
                "sampled": lambda p=p, length=length: timed(p[2], length, temperature=0.8, top_p=0.95),
                "static": lambda p=p, length=length: static.run(p[3], length),
            }
            order = list(runs) if round_ % 2 else list(runs)[::-1]
            for name in order:
                seconds, cpu = await runs[name]()
                if round_:
                    rates[name].append(count * length / seconds)
                    work[name].append(cpu)
        row: dict[str, Any] = {name: round(statistics.median(values), 1) for name, values in rates.items()}
        pairs = zip(rates["engine"], rates["bare"], strict=True)
        row |= {
            "concurrent": count,
            "engine/bare": round(statistics.median(e / b for e, b in pairs), 3),
            "engine/static": round(row["engine"] / row["static"], 3),
            "cpu bare/engine": round(sum(work["bare"]) / sum(work["engine"]), 3),
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    report["rows"] = rows
    report["prefix"] = await prefix(ours, vocabulary)
    bare.close()
    static.close()
    await ours.close()
    return report


async def prefix(ours: Ours, vocabulary: int) -> dict[str, float]:
    """Time to first token, seconds: a new 600-token prefix, then another prompt with the same one."""
    ratios, firsts, seconds = [], [], []
    for round_ in range(3):
        (shared,) = prompts_of(vocabulary, 1, 500 + round_, 600)
        first = await ours.first_token_after([*shared, 101, 102, 103])
        second = await ours.first_token_after([*shared, 104, 105, 106])
        firsts.append(first)
        seconds.append(second)
        ratios.append(second / first)
    return {
        "first_seconds": round(statistics.median(firsts), 3),
        "second_seconds": round(statistics.median(seconds), 3),
        "second/first": round(statistics.median(ratios), 3),
    }


def show(report: dict[str, Any]) -> None:
    names = ["concurrent", "bare", "engine", "sampled", "static", "engine/bare", "engine/static", "cpu bare/engine"]
    print(f"{report['dtype']}, {report['threads']} threads, loaded in {report['load_seconds']} s; tokens/s:")
    print("".join(f"{name:>16}" for name in names))
    for row in report["rows"]:
        print("".join(f"{row[name]:>16}" for name in names))
    shared = report["prefix"]
    print(
        f"shared 600-token prefix: first token after {shared['first_seconds']} s, "
        f"then {shared['second_seconds']} s; ratio {shared['second/first']} (bound 0.3)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: the fetched model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--length",
        type=int,
        default=48,
        help="tokens per answer; the shorter, the more weighs that ours start and end in turn, so that "
        "no running stream pauses",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrent", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--cache-tokens", type=int, default=32768)
    parser.add_argument("--json", help="write the report to this file")
    parser.add_argument("--quick", action="store_true", help="one round of short answers")
    options = parser.parse_args()
    if options.quick:
        options.length, options.rounds = 24, 1
    if options.model is None:
        options.model = resolve_default()
    report = asyncio.run(measure(options))
    show(report)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
