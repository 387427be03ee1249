"""The socket of a chat page in a test's hands."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support import eventually_sync


def eventually(page: Any, check: Callable[[], Any]) -> None:
    """Meanwhile routes and sockets are served, which happens only within a call of the browser's."""
    eventually_sync(check, 15, pause=lambda seconds: page.wait_for_timeout(1000 * seconds))


class Wire:
    """A page's socket, on which messages of some types (``keep``) are kept back, whichever way they go.

    Attributes:
        kept: the messages that are kept back now.
        passed: the types of those that went through.
        sockets: how often the page has connected.
    """

    def __init__(self, *keep: str) -> None:
        self.keep = set(keep)
        self.passed: list[str] = []
        self.sockets = 0
        self._kept: list[tuple[Callable[[str], None], str]] = []
        self._ends: list[Any] = []

    def lay(self, page: Any) -> None:
        """For ``open_chat``."""
        page.route_web_socket("**/ws/chat", self._opened)

    def _opened(self, socket: Any) -> None:
        server = socket.connect_to_server()
        self.sockets += 1
        self._kept.clear()
        self._ends = [socket, server]
        socket.on_message(lambda raw: self._pass(server.send, raw))
        server.on_message(lambda raw: self._pass(socket.send, raw))

    def _pass(self, send: Callable[[str], None], raw: str) -> None:
        kind = json.loads(raw)["type"]
        if kind in self.keep:
            self._kept.append((send, raw))
        else:
            send(raw)
            self.passed.append(kind)

    @property
    def kept(self) -> list[str]:
        return [json.loads(raw)["type"] for _, raw in self._kept]

    def release(self) -> None:
        """Let go what is kept back, in its order, and keep nothing back from now on."""
        self.keep.clear()
        kept, self._kept = self._kept, []
        for send, raw in kept:
            self._pass(send, raw)

    def cut(self) -> None:
        """Break the connection; what is kept back is lost with it."""
        self.keep.clear()
        self._kept.clear()
        for end in self._ends:
            end.close(code=4000)
