"""The worker process: ``python -m inference.worker``, started by the supervisor.

Order matters here. The kernel is told first that this process must not outlive
its parent, the signal handlers come next, and only then is anything slow
imported. The device was chosen by the parent, in the environment, before torch
could look at it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

from inference.parent import die_with_parent
from inference.worker import MISCONFIGURED, RETIRED

if TYPE_CHECKING:
    from inference.worker.worker import Worker

logger = logging.getLogger("sluice.worker")

FATAL = 70
"""Exit status after an engine failure."""


class _Process:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stop = asyncio.Event()
        self.drain_timeout: float = args.drain_timeout
        self.worker: Worker | None = None
        self.signals = 0
        self.status = 0

    def on_signal(self) -> None:
        self.signals += 1
        if self.signals > 1:
            self.hurry.set()
        self.stop.set()

    def on_command(self, verb: str) -> None:
        """An operator's ``drain`` (for good) or ``restart`` (at once); of several the last one counts."""
        self.status = RETIRED if verb == "drain" else 0
        if verb == "restart":
            self.hurry.set()
        self.stop.set()

    def tell_parent(self, word: bytes) -> None:
        try:
            os.write(self.args.status_fd, word)
        except OSError:
            os._exit(FATAL)

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        self.hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        from inference import tracing
        from inference.config import Config
        from inference.worker.worker import Worker

        tracing.configure("sluice-worker")
        config = Config.from_env()
        worker = self.worker = Worker(
            self.args.id,
            config,
            pool=self.args.pool,
            device=self.args.device,
            aliases=self.args.models.split(","),
            restarts=self.args.restarts,
            on_beat=lambda: self.tell_parent(b"."),
            on_fatal=self.fatal,
        )
        worker.on_command = self.on_command  # type: ignore[method-assign]
        await worker.start()
        loading = asyncio.create_task(self.load(worker, config), name="load")
        stopping = asyncio.create_task(self.stop.wait(), name="stop")
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            os._exit(self.status)  # nothing is held yet, and loading cannot be interrupted politely
        # As in servers: a step makes thousands of short-lived objects, and what is loaded stays.
        gc.set_threshold(20_000, 20, 50)
        gc.collect()
        gc.freeze()
        await worker.serve(loading.result())
        self.tell_parent(b"r")
        logger.info("worker %s is ready on %s", worker.id, self.args.device, extra={"event": "worker_ready"})
        await stopping
        await self.drain(worker)
        await worker.stop()
        if tracing.active():
            await asyncio.to_thread(tracing.shutdown)
        return self.status

    async def drain(self, worker: Worker) -> None:
        """Let it finish what it holds; hand that back as soon as there is a hurry."""
        if self.hurry.is_set():
            await worker.drain(0.0)
            return
        drain = asyncio.create_task(worker.drain(self.drain_timeout))
        hurry = asyncio.create_task(self.hurry.wait())
        await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            await worker.drain(0.0)
        hurry.cancel()

    async def load(self, worker: Worker, config: Any) -> Any:
        from inference.engine.factory import make_engine, make_tokenizer
        from inference.worker.heartbeat import Served

        specs = {s.alias: s for s in config.model_specs()}
        served = {}
        for alias in self.args.models.split(","):
            engine = make_engine(specs[alias], self.args.device, config)
            info = await engine.load(worker.sink(alias), worker.died)
            tokenizer = await asyncio.to_thread(make_tokenizer, specs[alias], config)
            served[alias] = Served(engine, info, tokenizer)
        return served

    def fatal(self, error: BaseException) -> None:
        logging.shutdown()
        os._exit(FATAL)


def main(argv: list[str] | None = None) -> int:
    """Entry point; see :mod:`inference.pool.supervisor` for the caller."""
    parser = argparse.ArgumentParser(prog="sluice-worker", description=__doc__)
    for name in ("--id", "--pool", "--device", "--models"):
        parser.add_argument(name, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--drain-timeout", type=float, default=30.0)
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    from inference.errors import ConfigError, SluiceError
    from inference.logs import configure

    configure(f"worker {args.id}")
    try:
        return asyncio.run(_Process(args).main())
    except SluiceError as exc:
        logger.critical("worker %s cannot start: %s", args.id, exc, extra={"event": "worker_failed"})
        return MISCONFIGURED if isinstance(exc, ConfigError) else FATAL


if __name__ == "__main__":
    raise SystemExit(main())
