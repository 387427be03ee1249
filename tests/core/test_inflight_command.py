"""``manage.py inflight`` as an operator runs it: a process of its own against a live deployment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest
import redis.asyncio as redis_async

from inference.gateway import RequestEnded
from tests.conftest import ROOT
from tests.core.conftest import Deploy, spec
from tests.support import eventually


async def inflight(url: str, *arguments: str) -> tuple[int, str]:
    """Exit status and standard output."""
    env = {**os.environ, "REDIS_URL": url, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "manage.py"), "inflight", *arguments, env=env, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 40)
    return process.returncode or 0, out.decode()


@pytest.mark.timeout(300)
async def test_list_cancel_and_audit(deploy: Deploy, redis_url: str) -> None:
    deployment = deploy()
    gateway, _ = await deployment.both()
    ended: list[str] = []

    async def serve() -> None:
        with pytest.raises(RequestEnded) as caught:
            async with gateway.request(spec(4000)) as stream:
                while True:
                    await stream.next()
        ended.append(str(caught.value.outcome))

    tasks = [asyncio.create_task(serve()) for _ in range(3)]
    await eventually(lambda: len(gateway.open_ids()) == 3 and all(s.received for s in gateway.streams()))
    ids = gateway.open_ids()
    status, out = await inflight(redis_url, "--json")
    assert (status, {v["id"] for v in json.loads(out)}) == (0, set(ids))
    status, out = await inflight(redis_url, "--audit", "--json")
    report: dict[str, Any] = json.loads(out)
    assert (status, report["findings"], report["records"]) == (0, [], 3)
    status, out = await inflight(redis_url, "--cancel", ids[0], "--json")
    assert (status, json.loads(out)) == (0, {"cancelled": [ids[0]]})
    status, _ = await inflight(redis_url, "--cancel", ids[0])
    assert status == 1, "it is not in flight any more"
    status, out = await inflight(redis_url, "--cancel-all", "--json")
    assert set(json.loads(out)["cancelled"]) == set(ids[1:])
    await asyncio.gather(*tasks)
    assert ended == ["cancelled(admin)"] * 3
    await deployment.clean(gateway)
    status, out = await inflight(redis_url)
    assert (status, out.split()[0]) == (0, "0")


async def test_audit_exits_1_where_something_is_left(redis_url: str, redis: redis_async.Redis) -> None:
    await redis.zadd("sluice:live", {"ghost": 1})
    await redis.rpush("sluice:log:{ghost}", "x")
    status, out = await inflight(redis_url, "--audit")
    assert status == 1
    assert "live names ghost" in out and "without a TTL" in out
    status, out = await inflight(redis_url, "--audit", "--json")
    assert status == 1 and len(json.loads(out)["findings"]) == 2


async def test_audit_never_asks_for_all_keys_at_once(redis_url: str, redis: redis_async.Redis) -> None:
    pipe = redis.pipeline()
    for number in range(5000):
        pipe.set(f"other:{number}", "x")
    await pipe.execute()
    await redis.config_resetstat()
    status, _ = await inflight(redis_url, "--audit")
    used = await redis.info("commandstats")
    assert status == 0
    assert "cmdstat_keys" not in used and used["cmdstat_scan"]["calls"] >= 10
