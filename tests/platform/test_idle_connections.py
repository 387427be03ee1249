"""Which connections without a request a drain closes at once, and which it gives a moment."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from sluice.server import http
from sluice.server.http import FIRST_REQUEST, SluiceChannel
from sluice.status import ServerState, ServerStatus


class Channel(SluiceChannel):
    closed = False

    def loseConnection(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http, "reactor", clock)
    return clock


@pytest.fixture
def parts() -> Iterator[tuple[Any, socket.socket]]:
    """A connection on which nothing has come, and the client's end of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel()
        channel.transport = SimpleNamespace(socket=ours)
        channel.server = SimpleNamespace(status=ServerStatus(), closed=lambda transport: None)
        channel.server.status.move(ServerState.REFUSING)
        yield channel, theirs


def test_one_that_has_been_used_goes_at_once(clock: Clock, parts: tuple[Any, socket.socket]) -> None:
    channel, _ = parts
    channel._new = False
    channel.close_if_idle()
    assert channel.closed


def test_a_new_one_has_a_moment(clock: Clock, parts: tuple[Any, socket.socket]) -> None:
    channel, _ = parts
    channel.close_if_idle()
    clock.advance(FIRST_REQUEST * 0.9)
    assert not channel.closed
    clock.advance(FIRST_REQUEST * 0.2)
    assert channel.closed


def test_what_came_in_that_moment_is_read(clock: Clock, parts: tuple[Any, socket.socket]) -> None:
    channel, client = parts
    channel.close_if_idle()
    client.send(b"G")
    clock.advance(FIRST_REQUEST)
    assert not channel.closed


def test_an_undone_drain_closes_nothing(clock: Clock, parts: tuple[Any, socket.socket]) -> None:
    channel, _ = parts
    channel.close_if_idle()
    channel.server.status.move(ServerState.SERVING, undo=True)
    clock.advance(FIRST_REQUEST)
    assert not channel.closed
    channel.server.status.move(ServerState.REFUSING)
    channel.close_if_idle()
    clock.advance(FIRST_REQUEST)
    assert channel.closed, "the next drain does"


def test_asked_twice_it_waits_once(clock: Clock, parts: tuple[Any, socket.socket]) -> None:
    channel, _ = parts
    channel.close_if_idle()
    channel.close_if_idle()
    assert len(clock.getDelayedCalls()) == 1


def test_nothing_waits_for_one_that_has_gone(clock: Clock, parts: tuple[Any, socket.socket]) -> None:
    channel, _ = parts
    channel.close_if_idle()
    channel.connectionLost(Failure(ConnectionError()))
    assert clock.getDelayedCalls() == []
