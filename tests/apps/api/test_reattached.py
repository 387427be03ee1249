"""A resumable request that is read again: in the very moment in which it ends, and long after it was accepted."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from apps.accounts.principal import Principal
from apps.api import deps
from apps.api.errors import ApiError
from apps.api.reattached import Reattached
from inference.engine.scripted_tokenizer import ScriptedTokenizer
from inference.gateway import RequestStream
from inference.messages import Ending
from tests.apps.api.live import Site, chat
from tests.support import eventually

CALLER = Principal("key:ab", None, False, frozenset({"generate", "read"}), None, "a key")
ENDING = Ending(
    id="r", model="demo", state="finished", reason="stop", endpoint="chat", transport="sse", owner="key:ab",
    server="s", worker="w", attempts=1, prompt_tokens=3, generated_tokens=5, created_ms=1, claimed_ms=2,
    first_token_ms=3, ended_ms=4,
)  # fmt: skip


class EndsMeanwhile:
    """A gateway whose request is alive when it is first asked about, and has ended when it is attached to."""

    def __init__(self, *, retained: bool = True) -> None:
        self._retained = retained
        self._ended = False
        self.left = 0

    async def ending(self, request_id: str) -> Ending | None:
        return ENDING if self._ended and self._retained else None

    @asynccontextmanager
    async def attach(self, request_id: str, *, owner: str = "") -> AsyncIterator[RequestStream]:
        self._ended = True

        async def log(*_: object) -> list[bytes]:
            return []

        try:
            yield RequestStream(request_id, None, read_log=log, buffer=8, attached=True, resumable=True)  # type: ignore[arg-type]
        finally:
            self.left += 1


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(alias: str) -> ScriptedTokenizer:
        return ScriptedTokenizer()

    monkeypatch.setattr(deps, "tokenizer", found)


async def test_what_ends_while_it_is_attached_to_is_replayed(monkeypatch: pytest.MonkeyPatch, tokenizer: None) -> None:
    """Asking for the ending first, and then attaching, said 404 although the log was retained."""
    gateway = EndsMeanwhile()
    monkeypatch.setattr(deps, "gateway", lambda: gateway)
    async with Reattached("r", CALLER) as again:
        assert again.plan.model == "demo"
        assert gateway.left == 0
    assert gateway.left == 1


async def test_what_is_not_known_any_more_is_left_again(monkeypatch: pytest.MonkeyPatch, tokenizer: None) -> None:
    gateway = EndsMeanwhile(retained=False)
    monkeypatch.setattr(deps, "gateway", lambda: gateway)
    with pytest.raises(ApiError) as refused:
        async with Reattached("r", CALLER):
            pass
    assert refused.value.status == 404
    assert gateway.left == 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("tokens", [3, 1000])
async def test_it_says_when_it_was_accepted_not_when_it_was_read_again(site: Site, tokens: int) -> None:
    """Both of one that has ended, and of one that has not."""
    body = chat(model="slow", max_tokens=tokens, ignore_eos=True, stream=True, resumable=True)

    async def created(method: str, path: str, **more: object) -> tuple[int, str]:
        """Of the first event; what an ended request still says is read to the end, and what goes on is left."""
        async with client.stream(method, path, **more) as reply:  # type: ignore[arg-type]
            lines = reply.aiter_lines()
            first = json.loads(await anext(line[6:] async for line in lines if line.startswith("data: ")))
            if tokens < 10:
                assert [line async for line in lines if line == "data: [DONE]"]
            return int(first["created"]), reply.headers["x-sluice-request"]

    async with site.client() as client:
        said, request = await created("POST", "/v1/chat/completions", json=body)
        view = (await client.get(f"/v1/requests/{request}")).json()
        assert view["created_ms"] // 1000 == said
        await eventually(lambda: time.time() >= said + 2, what="another second has begun")
        assert await created("GET", f"/v1/requests/{request}/events") == (said, request)
        await client.delete(f"/v1/requests/{request}")
