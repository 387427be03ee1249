"""What is held back of an answer must not look like silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from apps.accounts.principal import Principal
from apps.api import deps
from apps.api.generation import Generation
from apps.api.plan import Plan
from inference.config import Config
from inference.engine.scripted_tokenizer import ScriptedTokenizer
from inference.messages import Frame, Job, SamplingParams

CALLER = Principal("key:ab", None, False, frozenset({"generate", "read"}), None, "a key")
HIDDEN = 50


class Busy:
    """A gateway whose only stream always has a frame at hand, so that the core never asks for a ping."""

    id, redis, config = "s", None, SimpleNamespace(redis_prefix="sluice:")
    created_ms = 1000  # as a stream

    def __init__(self) -> None:
        self.given = 0

    @asynccontextmanager
    async def request(self, spec: object) -> AsyncIterator[Busy]:
        yield self

    async def next(self) -> list[Frame]:
        await asyncio.sleep(0.01)
        self.given += 1
        return [Frame(self.given, [1], "", "stop" if self.given == HIDDEN else None)]


@pytest.mark.parametrize(("interval", "asks"), [(0.05, True), (1000.0, False)])
async def test_tokens_of_which_nothing_is_shown_ask_for_pings(
    monkeypatch: pytest.MonkeyPatch, interval: float, asks: bool
) -> None:
    """Proxies cut a stream on which nothing is heard, while the model wrote a second call that was not to be shown."""
    gateway = Busy()
    monkeypatch.setattr(deps, "gateway", lambda: gateway)
    monkeypatch.setattr(deps, "config", lambda: Config(ping_interval=interval))
    job = Job("r", "demo", [1], SamplingParams(max_tokens=HIDDEN, seed=0))
    pings = 0
    async with Generation(
        Plan("r", "demo", "chat", ScriptedTokenizer(), [job], 1), CALLER, client="", transport="sse"
    ) as generation:
        while not generation.done:
            pings += not await generation.next()
    assert (pings > 0) is asks
