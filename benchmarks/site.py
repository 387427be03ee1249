"""What a benchmark of ours runs on: Valkey and a migrated database, or a whole deployment on them."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.processes import cpu_seconds, family, first_key, free_port, manage, resident_mib, running
from inference.embedded import EmbeddedValkey


@contextmanager
def base(folder: str, models: str, *, pin: bool = True, **settings: str) -> Iterator[tuple[dict[str, str], str, int]]:
    """The settings of our processes, an API key, and Valkey's process id (on the second processor with ``pin``)."""
    with EmbeddedValkey() as valkey:
        assert valkey.pid is not None
        if pin:
            os.sched_setaffinity(valkey.pid, {1})
        env = {
            "REDIS_URL": valkey.url,
            "DATABASE_URL": f"sqlite:///{folder}/bench-{valkey.pid}.sqlite3",
            "SLUICE_MODELS": models,
            "SLUICE_MAX_RUNNING": "4096",
            "SLUICE_MAX_QUEUED": "4096",
            "SLUICE_LOG_LEVEL": "WARNING",
            **settings,
        }
        yield env, first_key(env), valkey.pid


@dataclass
class Site:
    """A deployment, seen from outside; ``env`` are its settings."""

    port: int
    key: str
    server: int
    valkey: int
    env: dict[str, str]

    @property
    def redis_url(self) -> str:
        return self.env["REDIS_URL"]

    def rss(self) -> float:
        """Resident memory of the server, MiB."""
        return resident_mib(family(self.server))

    def metric(self, name: str) -> float:
        """Sum of a metric's series, as the server tells them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M)))

    def info(self) -> dict[str, Any]:
        """What Redis says of itself, and the processor time that it has used (``cpu``, seconds)."""
        with redis.Redis.from_url(self.redis_url) as client:
            return {**client.info(), "cpu": cpu_seconds([self.valkey])}


@contextmanager
def site(folder: str, models: str, **settings: str) -> Iterator[Site]:
    """Valkey, one pool, one server, up and ready; the server has a processor of its own."""
    wanted = {
        "SLUICE_MAX_RUNNING": "1024",
        "SLUICE_METRICS_ACCESS": "public",
        "SLUICE_LOG_LEVEL": "ERROR",
        **settings,
    }
    port = free_port()
    with ExitStack() as stack:
        env, key, valkey = stack.enter_context(base(folder, models, **wanted))
        stack.enter_context(running(manage("runworker", "--devices", "cpu"), env=env, cpu=1))
        ready = f"http://127.0.0.1:{port}/readyz"
        server = stack.enter_context(running(manage("serve", "--port", str(port)), env=env, cpu=0, ready=ready))
        yield Site(port, key, server.pid, valkey, env)
