"""A drain asked for without a signal: it goes as far as finishing, does not exit, and can be undone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice.conf import ServerConfig
from sluice.exchanges import ExchangeRegistry
from sluice.server import drain as drain_module
from sluice.server.drain import Drain, DrainHooks
from sluice.status import ServerState, ServerStatus
from tests.support import eventually, turns


class Server:
    """What the drain does to the server, noted."""

    accepting = True
    exit_code = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)

    async def wait_closed(self) -> None:
        self.calls.append("wait_closed")


class Hooks(DrainHooks):
    def __init__(self) -> None:
        self.states: list[str] = []
        self.calls: list[str] = []

    def state_changed(self, state: ServerState) -> None:
        self.states.append(str(state))

    async def end_streams(self) -> None:
        self.calls.append("end_streams")

    async def stop(self, timeout: float) -> None:
        self.calls.append("stop")


@pytest.fixture
def parts() -> tuple[Drain, Server, Hooks]:
    hooks, server = Hooks(), Server()
    config = ServerConfig(pre_drain=0.05, drain_deadline=5)
    drain = Drain(config, ServerStatus(), ExchangeRegistry(), hooks)
    drain.attach(server)
    return drain, server, hooks


async def test_steps_aside_and_comes_back(parts: tuple[Drain, Server, Hooks]) -> None:
    drain, server, hooks = parts
    exchange = drain.exchanges.open("sse", "/x", "r1")
    drain.on_command("drain")
    drain.on_command("drain")  # asked twice: once is enough
    await eventually(lambda: drain.status.state == ServerState.FINISHING)
    assert drain.status.refusing
    assert drain.status.seconds_left() is None
    drain.on_command("undrain")
    assert drain.status.state == ServerState.SERVING
    assert not drain.status.leaving
    exchange.release()
    await turns()
    assert hooks.states == ["pausing", "refusing", "finishing", "serving"]
    assert server.calls == ["close_idle"]
    drain.on_command("undrain")  # nothing to undo
    assert hooks.states[-1] == "serving"


async def test_signal_after_an_operators_drain_skips_the_pause(
    parts: tuple[Drain, Server, Hooks], caplog: pytest.LogCaptureFixture
) -> None:
    drain, server, hooks = parts
    caplog.set_level("INFO", "sluice.drain")
    drain.on_command("drain")
    await eventually(lambda: drain.status.state == ServerState.FINISHING)
    await eventually(lambda: [r for r in caplog.records if r.__dict__.get("event") == "drained"])
    await turns()
    assert hooks.calls == []
    drain.on_sigterm()
    drain.on_command("undrain")  # too late
    await eventually(lambda: "stop" in server.calls)
    assert hooks.states == ["pausing", "refusing", "finishing", "finishing", "ending"]
    assert hooks.calls == ["end_streams", "stop"]


async def test_undone_drain_can_be_asked_for_again(parts: tuple[Drain, Server, Hooks]) -> None:
    drain, _, hooks = parts
    for _ in range(2):
        drain.on_command("drain")
        await eventually(lambda: drain.status.state == ServerState.FINISHING)
        drain.on_command("undrain")
    assert hooks.states == ["pausing", "refusing", "finishing", "serving"] * 2


async def test_failing_steps_do_not_stop_the_drain(parts: tuple[Drain, Server, Hooks]) -> None:
    drain, server, hooks = parts

    async def broken(*args: Any) -> None:
        raise RuntimeError("no")

    hooks.end_streams = broken  # type: ignore[method-assign]
    hooks.stop = broken  # type: ignore[method-assign]
    drain.on_sigterm()
    await eventually(lambda: "stop" in server.calls)
    assert drain.status.state == ServerState.ENDING
    assert server.exit_code == 0


async def test_a_redis_that_says_nothing_holds_up_no_step(
    parts: tuple[Drain, Server, Hooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each log line used to wait for it, on top of the time that the steps have: the drain outlasted its deadline."""
    drain, server, hooks = parts
    ended = asyncio.Event()

    async def silent() -> str:
        await ended.wait()
        return ""

    async def end() -> None:
        ended.set()

    monkeypatch.setattr("sluice.server.drain.DESCRIBE_SECONDS", 600.0)
    hooks.describe = silent  # type: ignore[method-assign]
    hooks.end_streams = end  # type: ignore[method-assign]
    drain.config = ServerConfig(pre_drain=0, drain_deadline=0.05)
    exchange = drain.exchanges.open("sse", "/x", "r1")
    drain.on_sigterm()
    await asyncio.wait_for(ended.wait(), 20)
    exchange.release()
    await eventually(lambda: "stop" in server.calls)


async def test_a_drain_says_every_five_seconds_what_it_waits_for(
    parts: tuple[Drain, Server, Hooks], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the pause, too, which was silent however long it was; as a warning from half a minute on."""
    assert (drain_module.LOG_EVERY, drain_module.WARN_AFTER) == (5.0, 30.0)
    monkeypatch.setattr(drain_module, "LOG_EVERY", 0.01)
    caplog.set_level("INFO", "sluice.drain")
    drain, server, _ = parts
    drain.config = ServerConfig(pre_drain=1000, drain_deadline=1000, termination_grace=None)
    exchange = drain.exchanges.open("sse", "/x", "r1")

    def said(state: ServerState, level: str) -> bool:
        lines = [r for r in caplog.records if r.__dict__.get("event") == "drain_progress" and r.levelname == level]
        of_state = [line.getMessage() for line in lines if f"draining ({state})" in line.getMessage()]
        assert all("s left; exchanges: sse /x=1; no requests; open: r1" in line for line in of_state)
        return len(of_state) > 2

    drain.on_sigterm()
    await eventually(lambda: said(ServerState.PAUSING, "INFO"))
    monkeypatch.setattr(drain_module, "WARN_AFTER", 0.0)
    await eventually(lambda: said(ServerState.PAUSING, "WARNING"))
    drain.on_sigint()
    await eventually(lambda: said(ServerState.FINISHING, "WARNING"))
    exchange.release()
    await eventually(lambda: "stop" in server.calls)


def test_states_only_move_forward() -> None:
    status = ServerStatus()
    status.move(ServerState.REFUSING)
    with pytest.raises(ValueError, match="refusing back to serving"):
        status.move(ServerState.SERVING)
    status.move(ServerState.SERVING, undo=True)
    assert status.state is ServerState.SERVING


@pytest.mark.parametrize(
    ("signals", "said"),
    [("int term", "SIGTERM: not"), ("term term", "SIGTERM again: not"), ("int int", "SIGINT again: not")],
)
async def test_the_signal_that_hurries_is_named_as_it_came(
    parts: tuple[Drain, Server, Hooks], caplog: pytest.LogCaptureFixture, signals: str, said: str
) -> None:
    """``up`` follows one Ctrl-C by a SIGTERM, and nobody has seen another before."""
    drain, _, _ = parts
    drain.exchanges.open("sse", "/x", "r1")
    for name in signals.split():
        getattr(drain, {"term": "on_sigterm", "int": "on_sigint"}[name])()
        await eventually(lambda: drain.status.state in (ServerState.FINISHING, ServerState.ENDING))
    await eventually(lambda: drain.status.state is ServerState.ENDING)
    drain.on_sigterm()
    assert [r.message for r in caplog.records if "waiting" in r.message] == [f"{said} waiting any longer"]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def test_a_signal_when_nothing_is_waited_for_says_nothing(
    parts: tuple[Drain, Server, Hooks], caplog: pytest.LogCaptureFixture
) -> None:
    drain, server, _ = parts
    drain.on_sigint()
    await eventually(lambda: "stop" in server.calls)
    drain.on_sigterm()
    assert [r.message for r in caplog.records if "waiting" in r.message] == []


@pytest.mark.parametrize(
    ("signals", "hurries"),
    [
        ("term term", True),
        ("term hup term", True),
        ("hup term", False),
        ("hup int", False),
        ("hup term term", True),
        ("hup int term", True),
        ("hup hup", False),
        ("int term", True),
        ("term hup", False),
    ],
)
async def test_which_signal_hurries(parts: tuple[Drain, Server, Hooks], signals: str, hurries: bool) -> None:
    """The second asks not to wait - unless the first came with a reload, and said nothing to this process alone."""
    drain, server, _ = parts
    drain.exchanges.open("sse", "/x", "r1")
    for name in signals.split():
        getattr(drain, {"term": "on_sigterm", "int": "on_sigint", "hup": "on_sighup"}[name])()
        await eventually(lambda: drain.status.state in (ServerState.FINISHING, ServerState.ENDING))
    await turns(100)
    assert (drain.status.state == ServerState.ENDING) == hurries
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
