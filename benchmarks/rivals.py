"""What the engine is compared with, each in a process of its own: ``python -m benchmarks.rivals bare``.

* ``bare``    transformers' continuous batching as it comes, streaming, tokens thrown away
* ``static``  ``model.generate`` on one batch: no streaming, no late arrivals

A process of its own, because OpenMP teams of several loops in one process keep each other from spinning
(``inference/engine/transformers/engine.py``), which would slow down all that is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.processes import ROOT
from inference.config import Config
from inference.engine.transformers.loading import Loaded, greedy_config, load_model
from inference.engine.transformers.sizing import batching_config

Prompts = Sequence[list[int]]


class Rival:
    """A process that answers prompts and says how long it took.

    Args:
        kind: ``bare`` or ``static``.
    """

    def __init__(self, kind: str, folder: str, device: str, config: Config) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rivals", kind, "--model", folder, "--device", device,
             "--dtype", config.dtype, "--max-running", str(config.max_running),
             "--cache-tokens", str(config.cache_tokens)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    async def run(self, prompts: Prompts, length: int) -> tuple[float, float]:
        """Seconds, and seconds of processor time, for ``length`` tokens after each prompt."""
        seconds, cpu = await asyncio.to_thread(self._ask, {"prompts": prompts, "length": length})
        return seconds, cpu

    def _ask(self, task: dict[str, Any]) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process to compare with has ended")
        answer: list[float] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Bare:
    """The library's manager with nothing of ours in it."""

    def __init__(self, loaded: Loaded, device: torch.device, config: Config) -> None:
        ours = batching_config(loaded, device, config)
        from transformers import ContinuousBatchingConfig

        self.manager = loaded.model.init_continuous_batching(
            greedy_config(),
            ContinuousBatchingConfig(
                page_size=ours.page_size,
                num_blocks=ours.num_blocks,
                max_batch_tokens=ours.max_batch_tokens,
                max_requests_per_batch=ours.max_requests_per_batch,
                use_async_batching=False,
                auto_switch_to_flash=ours.auto_switch_to_flash,
            ),
        )
        self.numbers = 0
        with torch.inference_mode():
            self.manager.warmup()
            self.manager.start()

    def run(self, prompts: Prompts, length: int) -> None:
        for prompt in prompts:
            self.numbers += 1
            self.manager.add_request(
                prompt, request_id=f"b{self.numbers}", max_new_tokens=length, streaming=True, eos_token_id=[-1]
            )
        left = len(prompts)
        while left:
            output = self.manager.get_result(timeout=60)
            if output is None:
                raise SystemExit("the bare loop gave nothing for a minute")
            left -= output.is_finished()

    def close(self) -> None:
        self.manager.stop(block=True, hard_stop=True)


def static(model: Any, prompts: Prompts, length: int) -> None:
    """One batch through ``generate``; the prompts have equal lengths, so nothing is padded."""
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )


def serve(run: Callable[[Prompts, int], None]) -> None:
    """Answer what comes on standard input, line by line, until it is closed."""
    for line in sys.stdin:
        task = json.loads(line)
        began, worked = time.perf_counter(), time.process_time()
        run(task["prompts"], task["length"])
        print(json.dumps([time.perf_counter() - began, time.process_time() - worked]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["bare", "static"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--cache-tokens", type=int, default=0)
    args = parser.parse_args()
    config = Config(dtype=args.dtype, max_running=args.max_running, cache_tokens=args.cache_tokens)
    device = torch.device(args.device)
    # The thread that loads ends, and its OpenMP team with it: what computes has the only one.
    with ThreadPoolExecutor(max_workers=1) as loader:
        loaded = loader.submit(load_model, args.model, device, config).result()
        bare = loader.submit(Bare, loaded, device, config).result() if args.kind == "bare" else None
    if bare is None:
        serve(lambda prompts, length: static(loaded.model, prompts, length))
    else:
        serve(bare.run)
        bare.close()


if __name__ == "__main__":
    main()
