"""How many prompts may be prepared at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from apps.api import deps, prompts
from apps.api.errors import ApiError


@pytest.mark.parametrize(("queue", "most"), [(8, 256), (300, 300)])
async def test_as_many_prompts_as_may_wait_are_prepared(monkeypatch: pytest.MonkeyPatch, queue: int, most: int) -> None:
    release = asyncio.Event()

    async def offload(work: object) -> None:
        await release.wait()

    monkeypatch.setattr(deps, "offload", offload)
    monkeypatch.setattr(deps, "config", lambda: SimpleNamespace(max_queued=queue))
    taken = [asyncio.create_task(prompts.in_thread(lambda: None)) for _ in range(most)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await prompts.in_thread(lambda: None)
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    release.set()
    await asyncio.gather(*taken)
    await prompts.in_thread(lambda: None)
