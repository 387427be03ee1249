"""Faults that nobody foresaw, in the tasks on which every request of a process depends: they go on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from inference import background
from inference.background import Background
from inference.errors import SluiceError
from inference.gateway.settler import Settler
from inference.lifecycle import Outcome, Reason
from inference.redisio import Commander, connect
from tests.core.conftest import Deploy, read, spec

SECONDS = 30


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSE", 0.01)


async def test_a_task_that_fails_says_so_and_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    begun = 0
    again = asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError("unforeseen")
        again.set()
        await asyncio.Event().wait()

    task = Background("somebody", work)
    with caplog.at_level(logging.ERROR):
        task.start()
        task.start()
        await asyncio.wait_for(again.wait(), SECONDS)
    assert [r.getMessage() for r in caplog.records] == ["somebody has failed and begins again"] * 2
    await task.stop()
    await task.stop()
    assert begun == 3


async def test_a_task_that_answers_its_end_with_an_error_ends() -> None:
    at_work = asyncio.Event()

    async def work() -> None:
        at_work.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("as some libraries do") from None

    task = Background("somebody", work)
    task.start()
    await asyncio.wait_for(at_work.wait(), SECONDS)
    await asyncio.wait_for(task.stop(), SECONDS)


async def test_a_server_goes_on_beating(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stopped without a word, and others took it for dead and ended its requests."""
    deployment = deploy()
    gateway, _ = await deployment.both()
    failed = asyncio.Event()

    async def broken() -> Any:
        failed.set()
        raise ValueError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.views, "pools", broken)
        await asyncio.wait_for(failed.wait(), SECONDS)
    await asyncio.wait_for(gateway.presence.wait_refreshed(), SECONDS)
    async with gateway.request(spec(6)) as stream:
        await read(stream)
    await deployment.clean(gateway)


async def test_a_note_that_can_not_be_dealt_with_does_not_stay() -> None:
    """It stayed for good, and the server waited for it when it had to end."""

    class Store:
        async def settle(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("unforeseen")

    settler = Settler(Store(), "s", lambda ending: None)  # type: ignore[arg-type]
    settler.start()
    await asyncio.wait_for(settler.put("r", Outcome.cancelled(Reason.CLIENT_GONE)), SECONDS)
    assert settler.pending == 0
    assert await settler.stop(SECONDS) == 0


async def test_a_command_that_can_not_be_written_fails_alone(redis_url: str) -> None:
    """It ended the connection's task, and no command of the process was ever answered again."""
    commander = Commander(lambda: connect(redis_url, timeout=SECONDS, client_name="t"), name="t")
    commander.start()
    with pytest.raises(SluiceError, match="could not be sent"):
        await asyncio.wait_for(commander.call("GET", "half a character: \ud800"), SECONDS)
    assert await asyncio.wait_for(commander.call("PING"), SECONDS)
    await commander.stop()
