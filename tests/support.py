"""Waiting on conditions with a deadline, and other helpers shared by the tests."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def eventually(
    check: Callable[[], T | Awaitable[T]], timeout: float = 10.0, *, every: float = 0.02, what: str = ""
) -> T:
    """Return the first truthy result of ``check`` (plain or async); fail after ``timeout`` seconds.

    An AssertionError raised by ``check`` counts as "not yet", and is the failure at the deadline.
    """
    deadline = time.monotonic() + timeout
    while True:
        last: BaseException | None = None
        try:
            result: Any = check()
            if inspect.isawaitable(result):
                result = await result
            if result:
                return result
        except AssertionError as exc:
            last = exc
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or _source(check)}") from last
        await asyncio.sleep(every)


def eventually_sync(
    check: Callable[[], T],
    timeout: float = 10.0,
    *,
    every: float = 0.02,
    what: str = "",
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """As :func:`eventually`, outside an event loop; ``pause`` waits so many seconds between two looks."""
    deadline = time.monotonic() + timeout
    while True:
        last: BaseException | None = None
        try:
            result = check()
            if result:
                return result
        except AssertionError as exc:
            last = exc
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or _source(check)}") from last
        pause(every)


async def turns(count: int = 10) -> None:
    """Let the event loop do all that is ready, so many times over: enough for what waits for no clock and no socket."""
    for _ in range(count):
        await asyncio.sleep(0)


def _source(check: Callable[[], Any]) -> str:
    try:
        return inspect.getsource(check).strip()
    except (OSError, TypeError):  # also: a functools.partial, or a method of what is built in, has none
        return repr(check)


def find_free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
