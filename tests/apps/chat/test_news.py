"""Which pages are told of what a page changes by HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model
from django.test import AsyncClient

from apps.chat import turns
from inference.config import Config
from sluice import runtime
from sluice.asgi import application

TIMEOUT = 20


class Page:
    """An open chat page: its socket, its name, and what it asks for by HTTP."""

    def __init__(self) -> None:
        self.client = AsyncClient()

    async def open(self, user: Any) -> Page:
        await self.client.aforce_login(user)
        cookie = f"sessionid={self.client.cookies['sessionid'].value}".encode()
        headers = [(b"cookie", cookie), (b"origin", b"http://localhost"), (b"host", b"localhost")]
        self.socket = WebsocketCommunicator(application, "/ws/chat", headers=headers, subprotocols=["sluice.v1"])
        assert (await self.socket.connect(timeout=TIMEOUT))[0]
        self.name = (await self.socket.receive_json_from(TIMEOUT))["page"]
        return self

    async def change(self, conversation: Any, **changes: Any) -> None:
        path = f"/chat/conversations/{conversation.id}"
        headers = {"X-Chat-Page": self.name}
        if changes:
            reply = await self.client.patch(path, changes, content_type="application/json", headers=headers)
        else:
            reply = await self.client.delete(path, headers=headers)
        assert reply.status_code == 200, reply.content

    async def told(self) -> list[dict[str, Any]]:
        """What it has been told since it was asked last."""
        await self.socket.send_json_to({"type": "ping", "id": "p"})
        messages = []
        while (message := await self.socket.receive_json_from(TIMEOUT))["type"] != "pong":
            messages.append(message)
        return messages


@pytest.fixture
async def pages(
    transactional_db: Any, monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Config]
) -> AsyncIterator[list[Page]]:
    """Two of one user, and one of somebody else."""
    monkeypatch.setattr(runtime, "_config", make_config())
    ada, eve = [await sync_to_async(get_user_model().objects.create_user)(name) for name in ("ada", "eve")]
    opened = [await Page().open(user) for user in (ada, ada, eve)]
    yield opened
    for page in opened:
        await page.socket.disconnect(timeout=TIMEOUT)
    await runtime.stop(5.0)  # sockets start the gateway where nobody has


async def test_the_users_other_pages_are_told_of_a_change(pages: list[Page]) -> None:
    one, two, stranger = pages
    ada = await get_user_model().objects.aget(username="ada")
    turn = await sync_to_async(turns.start_turn)(ada, "send", {"text": "x"}, "ref", "m")
    news = {"type": "changed", "conversation": str(turn.conversation.id), "answer": None}
    await one.change(turn.conversation, title="New")
    await one.change(turn.conversation, pinned=True)
    await one.change(turn.conversation, leaf=str(turn.answer.id))  # what is read elsewhere stays
    assert await two.told() == [news, news]
    await two.change(turn.conversation)
    assert await one.told() == [news]
    assert await two.told() == []
    assert await stranger.told() == []
