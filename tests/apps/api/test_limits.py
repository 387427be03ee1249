"""Limits of a key that lets go of its answers and reads them later."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import redis.asyncio as redis_async

from apps.api import generation
from apps.api.choices import Usage
from inference.errors import StoreUnavailable
from tests.apps.api.live import Site, chat, manage
from tests.support import eventually

BODY = chat(model="slow", max_tokens=40, ignore_eos=True, resumable=True)
PROMPT = 21
"""Tokens of :data:`BODY`'s prompt in the scripted model."""


async def begin_and_leave(client: httpx.AsyncClient) -> str:
    """Ask for a resumable answer and leave with its first piece; gives the request's id."""
    async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                return str(httpx.Response(200, text=line.removeprefix("data: ")).json()["id"])
    raise AssertionError("the stream has ended")


async def test_an_answer_that_nobody_reads_counts_until_its_end(site: Site) -> None:
    """Whoever left at once had as many answers at once as wanted, and had them for nothing."""
    key = manage(site, "apikey", "create", "one", "--concurrent-requests", "1", "--tokens-per-day", "200", "--quiet")
    key = key.strip()
    day = f"sluice:limit:day:key:{key.split('-')[2]}"
    async with (
        site.client(key) as client,
        redis_async.from_url(site.env["REDIS_URL"]) as redis,
    ):
        request_id = await begin_and_leave(client)
        refused = await client.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        await eventually(lambda: redis.hget(day, "used"), 30, what="the lease is given back")
        assert await redis.hget(day, "used") == str(PROMPT + 40).encode()
        # Reading it now costs nothing more, and another one is let in.
        async with client.stream("GET", f"/v1/requests/{request_id}/events") as reply:
            assert reply.status_code == 200
            assert "[DONE]" in (await reply.aread()).decode()
        assert (await client.post("/v1/chat/completions", json={**BODY, "max_tokens": 1})).status_code == 200


async def test_one_that_is_cancelled_meanwhile_counts_with_what_it_had(site: Site) -> None:
    key = manage(site, "apikey", "create", "two", "--concurrent-requests", "1", "--quiet").strip()
    async with site.client(key) as client:
        request_id = await begin_and_leave(client)
        assert (await client.delete(f"/v1/requests/{request_id}")).status_code == 200

        async def let_in() -> bool:
            reply = await client.post("/v1/chat/completions", json=chat(max_tokens=1))
            return reply.status_code == 200

        await eventually(let_in, 30, what="the next request is let in")


class Gateway:
    """Answers as it is told: a view or an ending per question, an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def view(self, request_id: str) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ending = view


async def test_what_is_forgotten_counts_as_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FOLLOW_INTERVAL", 0.0)
    gateway: Any = Gateway("alive", StoreUnavailable("away"), None, StoreUnavailable("away"), None, None)
    async with asyncio.timeout(10):
        assert await generation._used_in_all(gateway, ["r"], Usage(3, 4, 0)) == 7
    assert gateway.answers == []
