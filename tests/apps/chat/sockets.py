"""The chat page's socket as tests use it."""

from __future__ import annotations

from typing import Any

from channels.testing import WebsocketCommunicator
from django.test import AsyncClient

from sluice.asgi import application

TIMEOUT = 20


async def open_chat(user: Any) -> WebsocketCommunicator:
    """The socket of this user's chat page."""
    browser = AsyncClient()
    await browser.aforce_login(user)
    cookie = browser.cookies["sessionid"].value
    headers = [(b"cookie", f"sessionid={cookie}".encode()), (b"origin", b"http://localhost"), (b"host", b"localhost")]
    socket = WebsocketCommunicator(application, "/ws/chat", headers=headers, subprotocols=["sluice.v1"])
    connected, _ = await socket.connect(timeout=TIMEOUT)
    assert connected
    assert (await socket.receive_json_from(TIMEOUT))["type"] == "hello"
    return socket
