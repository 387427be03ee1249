"""One model over several devices: a process per device, by transformers' own tensor-parallel plan.

The engine's process is the first of the group and the only one that anybody
talks to. It starts one more process per further device; each loads its share
of the weights and runs the same batching loop. The library hands requests and
cancels from the first process to the others before each step, and all of them
schedule alike. What only the first can know, our parts hand over themselves:
which tokens the sampler chose, and how much of a prompt fits in a step.

A group lives and dies as one. The kernel kills the others when the first ends,
and the first ends when one of the others does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from inference.config import Config
from inference.errors import EngineDied

GOODBYE_SECONDS = 10.0
"""How long the others may take to end after the loop has stopped."""


class Group:
    """The further processes of an engine; none where it has one device.

    Args:
        devices: one per process; the first is the engine's own.
    """

    def __init__(self, folder: str, alias: str, devices: Sequence[str], config: Config) -> None:
        self.devices = list(devices)
        self._folder = folder
        self._alias = alias
        # It shows in the list of processes, where no address or password belongs.
        self._config = msgspec.structs.replace(config, redis_url="", models=Config().models)
        self._others: list[subprocess.Popen[bytes]] = []
        self._stopping = False

    def start(self, on_end: Callable[[EngineDied], None]) -> None:
        """Start the other processes; ``on_end`` hears in this event loop's thread that one has ended.

        They die with the thread that calls this (to the kernel it is their parent).
        """
        if len(self.devices) == 1:
            return
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(len(self.devices))}
        if sys.platform == "linux":
            # All on this host: nothing of it is for other hosts to reach.
            group |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        loop = asyncio.get_running_loop()
        for rank, device in list(enumerate(self.devices))[1:]:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "inference.engine.follower", "--parent", str(os.getpid()),
                    "--folder", self._folder, "--alias", self._alias, "--device", device,
                    "--config", msgspec.json.encode(self._config),
                ],
                env={**os.environ, **group, **_place(rank, device)},
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            self._others.append(process)
            threading.Thread(
                target=self._watch, args=(rank, process, loop, on_end), name=f"rank-{rank}-watch", daemon=True
            ).start()
        os.environ.update(group | _place(0, self.devices[0]))

    def _watch(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[EngineDied], None],
    ) -> None:
        status = process.wait()
        if self._stopping:
            return
        error = EngineDied(f"process {rank} of {self._alias} on {self.devices[rank]} ended with status {status}")
        try:
            loop.call_soon_threadsafe(on_end, error)
        except RuntimeError:
            return  # this process is on its way out as well

    def stop(self) -> None:
        """Let the others end, or make them, and leave the group. Blocks, for ``GOODBYE_SECONDS`` at most."""
        self._stopping = True
        for process in self._others:
            try:
                process.wait(GOODBYE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._others:
            self._others = []
            leave()


def leave() -> None:
    """Take this process out of its group, so that it may join another."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def _place(rank: int, device: str) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": device.partition(":")[2] or str(rank)}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def follow(folder: str, alias: str, device: str, config: Config) -> BaseException | None:
    """Be one of the other processes: run the loop until the first stops it. Blocks."""
    import torch

    from inference.engine.transformers.generation import Registry
    from inference.engine.transformers.loading import load_model, set_cpu_threads
    from inference.engine.transformers.loop import BatchingLoop
    from inference.engine.transformers.scheduler import StepLog

    ranks, place = int(os.environ["WORLD_SIZE"]), torch.device(device)
    if place.type == "cpu":
        set_cpu_threads(config, ranks)
    loaded = load_model(folder, place, config, ranks=ranks)
    batching = BatchingLoop(
        alias,
        loaded,
        place,
        config,
        registry=Registry(),
        log=StepLog(),
        receive=_ignore,
        cancelled=_ignore,
        events=None,
        ranks=ranks,
    )
    # It has nothing to wait for but the first process, which wakes it by the group's own exchange.
    batching.manager._wake_up_loop = _Awake()
    batching.start(_ignore)
    return batching.join()


class _Awake(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return True


def _ignore(_: Any) -> None:
    """Outputs and cancels concern the first process."""
