"""200 concurrent callers of one key on two server processes: what is admitted is the limit, to the request.

``pytest -s`` prints the figures that docs/security.md shows.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inference.embedded import EmbeddedValkey
from tests.apps.api import live
from tests.conftest import ROOT
from tests.support import eventually_sync

CALLERS = 200
MAKE_KEY = """
import sys, django
django.setup()
from apps.accounts.services import create_key
name, value = sys.argv[1], int(sys.argv[2])
print(create_key(None, name=name, limits={name: value}).secret)
"""


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, empty_valkey: EmbeddedValkey
) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Addresses of two servers over one Redis and one database, and the environment of both."""
    folder = tmp_path_factory.mktemp("pair")
    # A full queue refuses as well, and what it refuses has kept others from their share meanwhile.
    site = live.start(folder, empty_valkey, SLUICE_MAX_QUEUED="1000")
    env = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "REDIS_URL": empty_valkey.url,
        "SLUICE_MODELS": live.MODELS, "SLUICE_VAR_DIR": str(folder),
        "SLUICE_PRE_DRAIN": "0", "SLUICE_DEBUG": "0", "SLUICE_MAX_QUEUED": "1000",
    }  # fmt: skip
    command = [sys.executable, "manage.py", "serve", "--port", "0"]
    with (folder / "second.log").open("w") as log:
        second = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert second.stdout is not None
        found = re.search(r"Listening on (http://[^/]+)/", second.stdout.readline())
        assert found, (folder / "second.log").read_text()
        eventually_sync(lambda: httpx.get(f"{found[1]}/readyz").status_code == 200, 60, every=0.1)
        yield site.url, found[1], env
    finally:
        site.processes.insert(0, second)
        live.stop(site)


async def storm(urls: tuple[str, str], key: str, body: dict[str, object]) -> tuple[Counter[int], list[float], float]:
    """Statuses of 200 calls at once, half on each server; Retry-After of the refused; seconds it took."""
    waits: list[float] = []
    limits = httpx.Limits(max_connections=CALLERS)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers, timeout=90, limits=limits) as client:

        async def call(i: int) -> int:
            reply = await client.post(f"{urls[i % 2]}/v1/chat/completions", json=body)
            if reply.status_code == 429:
                waits.append(float(reply.headers["retry-after"]))
            return reply.status_code

        began = time.monotonic()
        statuses = Counter(await asyncio.gather(*(call(i) for i in range(CALLERS))))
        return statuses, waits, time.monotonic() - began


def key_with(env: dict[str, str], name: str, value: int) -> str:
    env = {**env, "DJANGO_SETTINGS_MODULE": "sluice.settings"}
    command = [sys.executable, "-c", MAKE_KEY, name, str(value)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.strip()


# Prompt "hi" of the scripted model and its answer: 21 tokens are reserved and used for the prompt, 8 for the answer.
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "limit", "exactly"),
    [("requests_per_minute", 50, 50), ("tokens_per_day", 29 * 60 + 28, 60), ("tokens_per_minute", 29 * 40, 40)],
)
async def test_exactly_the_limit_is_admitted(
    pair: tuple[str, str, dict[str, str]], name: str, limit: int, exactly: int
) -> None:
    one, two, env = pair
    statuses, waits, seconds = await storm((one, two), key_with(env, name, limit), live.chat(ignore_eos=True))
    refill = 0 if name == "tokens_per_day" else int(seconds * exactly / 60) + 1
    print(f"\n{name} {limit}: {CALLERS} callers, {statuses[200]} admitted ({exactly} fit at once, "
          f"up to {refill} more come back in the {seconds:.1f} s), {statuses[429]} refused")  # fmt: skip
    assert set(statuses) == {200, 429}
    assert exactly <= statuses[200] <= exactly + refill
    assert len(waits) == statuses[429] and min(waits) > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_concurrent_requests_are_exact(pair: tuple[str, str, dict[str, str]], tmp_path: Path) -> None:
    """Each admitted one goes on for long enough that all 200 have asked meanwhile."""
    one, two, env = pair
    body = live.chat(model="slow", max_tokens=400, ignore_eos=True)
    statuses, _, seconds = await storm((one, two), key_with(env, "concurrent_requests", 7), body)
    print(
        f"\nconcurrent_requests 7: {CALLERS} callers, {statuses[200]} admitted, "
        f"{statuses[429]} refused ({seconds:.1f} s)"
    )
    assert statuses == {200: 7, 429: CALLERS - 7}
