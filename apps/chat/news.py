"""News between the pages that one user has open on this server; those elsewhere look again when they are shown."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from weakref import WeakSet

from sluice.consumers import StreamingWebSocketConsumer

_sockets: WeakSet[StreamingWebSocketConsumer] = WeakSet()
_telling: set[asyncio.Task[None]] = set()


def join(socket: StreamingWebSocketConsumer) -> None:
    """From now on the socket of an open page is told."""
    _sockets.add(socket)


def leave(socket: StreamingWebSocketConsumer) -> None:
    _sockets.discard(socket)


def tell(user_id: int, conversation: str, answer: str | None, *, but: StreamingWebSocketConsumer) -> None:
    """Let the user's pages other than ``but`` look at the conversation again; does not wait for them."""
    news = {"type": "changed", "conversation": conversation, "answer": answer}
    for socket in list(_sockets):
        if socket is not but and socket.open and socket.principal.user_id == user_id:
            _background(socket.send_json(news))


def _background(coroutine: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(coroutine, name="chat news")
    _telling.add(task)
    task.add_done_callback(_told)


def _told(task: asyncio.Task[None]) -> None:
    _telling.discard(task)
    if not task.cancelled():
        task.exception()  # a page that has just gone needs no news
