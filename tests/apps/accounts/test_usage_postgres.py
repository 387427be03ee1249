"""Usage on PostgreSQL, where several processes really write at the same time: each request still counts once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from inference.config import Config
from inference.store.store import RequestStore
from tests.apps.accounts.test_usage import used
from tests.conftest import ROOT
from tests.postgres import Postgres
from tests.support import eventually

pytestmark = pytest.mark.timeout(240)

#: Collects until it is told to end; says how many batches it has added.
COLLECT = """
import asyncio, sys
import django; django.setup()
from django.db import DatabaseError
from apps.accounts.usage import UsageCollector
from inference.config import Config
async def main():
    collector, end = UsageCollector(Config.from_env()), asyncio.Event()
    collector._redis.start()
    asyncio.get_running_loop().add_reader(sys.stdin, end.set)
    while not end.is_set():
        try:
            await collector.collect()
        except DatabaseError as exc:
            print("again:", type(exc).__name__, flush=True)
        await asyncio.sleep(0)
    await collector._redis.stop()
asyncio.run(main())
"""
#: Adds the same batches as everybody else, in an order of its own, trying again as a collector does.
ADD = """
import sys, random
import django; django.setup()
from datetime import date
from django.db import DatabaseError
from apps.accounts.usage import add
batches, added = list(range(60)), 0
random.Random(sys.argv[1]).shuffle(batches)
print("ready", flush=True)
sys.stdin.readline()  # all begin when all are there
for n in batches:
    one = {"requests": 1, "prompt_tokens": n, "generated_tokens": 2 * n}
    accounts = {(date(2026, 3, 1 + d), f"key:{n % 3}", "m"): one for d in range(3)}
    while True:
        try:
            added += add(f"batch-{n}", accounts)
            break
        except DatabaseError:
            pass
print(added)
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        done = manage(server, "manage.py", "migrate", "--verbosity", "0")
        done.communicate(timeout=120)
        assert done.returncode == 0
        yield server


def manage(server: Postgres, *arguments: str, **env: str) -> subprocess.Popen[str]:
    environ = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "DATABASE_URL": server.url,
        "DJANGO_SETTINGS_MODULE": "sluice.settings", **env,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


async def test_collectors_of_four_processes_count_each_request_once(
    postgres: Postgres, store: RequestStore, config: Config
) -> None:
    """Under load, one of them killed again and again at a random moment; then the sums are exact."""
    chance = random.Random(3)
    processes = [manage(postgres, "-c", COLLECT, REDIS_URL=config.redis_url) for _ in range(4)]
    done = asyncio.Event()

    async def load(worker: int) -> None:
        for i in range(150):
            await used(store, f"{worker}-{i}", f"key:{worker % 3}")
            await asyncio.sleep(0.02)  # the pace: it goes on while processes are killed

    async def kill() -> None:
        while not done.is_set():
            await asyncio.sleep(chance.uniform(0.5, 1.5))
            victim = processes.pop(0)
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            processes.append(manage(postgres, "-c", COLLECT, REDIS_URL=config.redis_url))

    killing = asyncio.create_task(kill())
    try:
        await asyncio.gather(*(load(w) for w in range(6)))
        done.set()
        await killing
        await eventually(lambda: _collected(store), 60, every=0.2, what="everything is in the database")
    finally:
        killing.cancel()
        for process in processes:
            process.communicate("end\n", timeout=30)
    rows = postgres.rows(
        "select owner, sum(requests), sum(prompt_tokens) from accounts_usagerecord where model = 'scripted' group by 1"
    )
    assert sorted((o, int(n), int(p)) for o, n, p in rows) == [(f"key:{k}", 300, 900) for k in range(3)]


async def _collected(store: RequestStore) -> bool:
    return not await store.redis.call("EXISTS", store.keys.usage, store.keys.usage_batch)


def test_a_batch_that_many_add_at_the_same_time_is_added_once(postgres: Postgres) -> None:
    """Four processes add the same sixty batches, each in another order, to the same nine records."""
    processes = [manage(postgres, "-c", ADD, str(n)) for n in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    added = [int(p.communicate(timeout=120)[0]) for p in processes]
    assert sum(added) == 60
    assert sum(n > 0 for n in added) > 1, "they did write at the same time"
    rows: list[Any] = postgres.rows(
        "select owner, day, requests, prompt_tokens, generated_tokens from accounts_usagerecord where model = 'm'"
    )
    assert len(rows) == 9
    for owner, _, requests, prompt, generated in rows:
        mine = [n for n in range(60) if owner == f"key:{n % 3}"]
        assert (requests, prompt, generated) == (len(mine), sum(mine), 2 * sum(mine))
