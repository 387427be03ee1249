"""Connections that send at once: nothing is left unsent, and closing is not forgotten."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from twisted.internet.protocol import Protocol

from sluice.server.transport import Transport


class Loop:
    """What a connection asks of the event loop."""

    def __init__(self) -> None:
        self.readers: set[Any] = set()
        self.writers: set[Any] = set()
        self.addReader, self.removeReader = self.readers.add, self.readers.discard
        self.addWriter, self.removeWriter = self.writers.add, self.writers.discard

    def callLater(self, *_: Any) -> None: ...


@pytest.fixture
def ends() -> Iterator[tuple[Transport, Loop, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(5)
    loop = Loop()
    transport = Transport(near, Protocol(), ("127.0.0.1", 1), None, 0, loop)
    yield transport, loop, far
    near.close()
    far.close()


def test_prompt_writes_leave_at_once(ends: tuple[Transport, Loop, socket.socket]) -> None:
    transport, loop, far = ends
    transport.prompt = True
    transport.write(b"token")
    assert far.recv(10) == b"token"
    assert transport not in loop.writers


@pytest.mark.parametrize("prompt", [True, False])
def test_closing_is_left_to_the_event_loop(ends: tuple[Transport, Loop, socket.socket], prompt: bool) -> None:
    """A connection that was closed in mid-stream stayed open: nobody was left to close it."""
    transport, loop, _ = ends
    transport.prompt = prompt
    transport.loseConnection()
    assert transport in loop.writers
    assert transport.doWrite() is not None  # what the event loop does next: it says that the connection is done


def test_what_does_not_fit_waits_for_the_event_loop(ends: tuple[Transport, Loop, socket.socket]) -> None:
    transport, loop, far = ends
    transport.prompt = True
    transport.write(b"x" * 4_000_000)
    assert transport in loop.writers
    got = 0
    while got < 4_000_000:
        got += len(far.recv(1_000_000))
        transport.doWrite()
    assert transport not in loop.writers
