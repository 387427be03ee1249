"""Gateway and worker in one event loop, on a real Valkey, with the scripted engine."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from inference.config import Config
from inference.engine.factory import make_engine, make_tokenizer
from inference.gateway import Gateway, RequestSpec, RequestStream
from inference.messages import Ending, Frame, Job, SamplingParams
from inference.store import AuditReport, audit
from inference.worker.heartbeat import Served
from inference.worker.worker import Worker
from tests.support import eventually

_ids = itertools.count(1)


def job(max_tokens: int = 8, *, model: str = "scripted", prompt: str = "hello", **params: Any) -> Job:
    """A job of the scripted model that runs to its token limit."""
    params.setdefault("ignore_eos", True)
    return Job(f"r{next(_ids)}", model, list(prompt.encode()), SamplingParams(max_tokens=max_tokens, **params))


def spec(max_tokens: int = 8, **options: Any) -> RequestSpec:
    params = {k: options.pop(k) for k in list(options) if k in SamplingParams.__struct_fields__}
    prompt = options.pop("prompt", "hello")
    return RequestSpec(
        job=job(max_tokens, prompt=prompt, **params),
        **{"endpoint": "chat", "transport": "sse", "owner": "key:test", **options},
    )


async def read(stream: RequestStream) -> list[Frame]:
    """All frames up to the last."""
    frames: list[Frame] = []
    while not frames or frames[-1].finish is None:
        frames += await stream.next()
    return frames


class Deployment:
    """Gateways and workers that share one Valkey."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.endings: list[Ending] = []
        self._workers: list[Worker] = []
        self._stack = AsyncExitStack()

    async def gateway(self, **overrides: Any) -> Gateway:
        gateway = Gateway(self.config, on_ending=self.endings.append, **overrides)
        await self._stack.enter_async_context(gateway)
        return gateway

    async def worker(self, name: str = "w1") -> Worker:
        fatal: list[BaseException] = []
        alias = self.config.model_specs()[0].alias
        worker = Worker(
            name,
            self.config,
            pool="p1",
            device="cpu",
            aliases=[alias],
            on_beat=lambda: None,
            on_fatal=fatal.append,
        )
        model = self.config.model_specs()[0]
        await worker.start()
        engine = make_engine(model, "cpu", self.config)
        info = await engine.load(worker.sink(alias), worker.died)
        await worker.serve({alias: Served(engine, info, make_tokenizer(model, self.config))})
        self._stack.push_async_callback(worker.stop)
        self._workers.append(worker)
        worker.fatal = fatal  # type: ignore[attr-defined]
        return worker

    async def both(self) -> tuple[Gateway, Worker]:
        worker = await self.worker()
        gateway = await self.gateway()
        await eventually(lambda: gateway.models(), what="the worker is seen")
        return gateway, worker

    async def clean(self, gateway: Gateway, strays: int = 0) -> AuditReport:
        """Wait until nothing is in flight, then audit; fails with the findings.

        ``strays``: how many requests may have needed the search for what nobody
        holds. It mends what other code leaves, and must not hide it.
        """
        await eventually(lambda: self._quiet(gateway), what="nothing in flight")
        report = await audit(gateway.store)
        assert report.findings == []
        assert report.records == 0
        assert gateway.strays + sum(w.strays for w in self._workers) == strays
        return report

    async def _quiet(self, gateway: Gateway) -> bool:
        # Asked of the workers themselves: what they last told Redis may be older than the request.
        workers = [w.beat() for w in self._workers]
        return await gateway.views.count() == 0 and all(
            w.held + w.stats.running + w.stats.waiting == 0 for w in workers
        )

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def deploy(make_config: Callable[..., Config]) -> AsyncIterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(**overrides: Any) -> Deployment:
        made.append(Deployment(make_config(**overrides)))
        return made[-1]

    yield make
    for deployment in made:
        await deployment.close()


Deploy = Callable[..., Deployment]
Check = Callable[[], Awaitable[bool]]
