"""News between the pages that one user has open on this server; those elsewhere look again when they are shown."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any
from weakref import WeakValueDictionary

from sluice.consumers import StreamingWebSocketConsumer

_pages: WeakValueDictionary[str, StreamingWebSocketConsumer] = WeakValueDictionary()
_telling: set[asyncio.Task[None]] = set()


def join(socket: StreamingWebSocketConsumer) -> str:
    """From now on the socket of an open page is told; what is returned names the page."""
    page = secrets.token_hex(8)
    _pages[page] = socket
    return page


def leave(page: str) -> None:
    _pages.pop(page, None)


def tell(user_id: int, conversation: str, answer: str | None, *, but: str) -> None:
    """Let the user's pages other than ``but`` look at the conversation again; does not wait for them."""
    news = {"type": "changed", "conversation": conversation, "answer": answer}
    for page, socket in list(_pages.items()):
        if page != but and socket.open and socket.principal.user_id == user_id:
            _background(socket.send_json(news))


def _background(coroutine: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(coroutine, name="chat news")
    _telling.add(task)
    task.add_done_callback(_told)


def _told(task: asyncio.Task[None]) -> None:
    _telling.discard(task)
    if not task.cancelled():
        task.exception()  # a page that has just gone needs no news
