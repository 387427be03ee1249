"""A whole deployment for a benchmark: Valkey, one pool, one server; the server on a processor of its own."""

from __future__ import annotations

import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.processes import ROOT, cpu_seconds, family, free_port, python, resident_mib, running
from inference.embedded import EmbeddedValkey


@dataclass
class Site:
    """The deployment, seen from outside."""

    port: int
    key: str
    server: int
    valkey: int
    redis_url: str

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
    """Everything up and ready; taken down when the block is left."""
    port = free_port()
    with ExitStack() as stack:
        valkey = stack.enter_context(EmbeddedValkey())
        os.sched_setaffinity(valkey.pid, {1})
        env = {
            "REDIS_URL": valkey.url,
            "DATABASE_URL": f"sqlite:///{folder}/bench.sqlite3",
            "SLUICE_MODELS": models,
            "SLUICE_MAX_RUNNING": "1024",
            "SLUICE_MAX_QUEUED": "4096",
            "SLUICE_METRICS_ACCESS": "public",
            "SLUICE_LOG_LEVEL": "ERROR",
            **settings,
        }
        run = {**os.environ, **env, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
        manage = python("manage.py")
        subprocess.run([*manage, "migrate", "--noinput", "-v", "0"], cwd=ROOT, env=run, check=True)
        made = subprocess.run(
            [*manage, "apikey", "create", "bench", "--quiet"],
            cwd=ROOT, env=run, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.enter_context(running([*manage, "runworker", "--devices", "cpu"], env=env, cpu=1))
        ready = f"http://127.0.0.1:{port}/readyz"
        server = stack.enter_context(running([*manage, "serve", "--port", str(port)], env=env, cpu=0, ready=ready))
        yield Site(port, made.stdout.strip(), server.pid, valkey.pid, valkey.url)
