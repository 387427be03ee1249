"""The proofs can fail: every way to lose an answer is counted as such, and one of them is enough."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from benchmarks.slow_readers import Cycle
from benchmarks.slow_readers import report as slow_report
from proofs.hosts import Scenario, nothing_lost
from proofs.load import Answer, Client, Load, judge
from proofs.network import Unavailable
from proofs.rollout import Round, Times, report
from proofs.switch import Port, Switch

TEXT = "one two three four five"


def answer(text: str = TEXT, **fields: object) -> Answer:
    made = Answer("sse", "p", 5, text=text, done=True)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (answer(), "ok"),
        (answer("", done=False, error="status 503", told=True), "failed"),
        (answer("one two", done=False, error="event: shutting_down", told=True), "failed"),
        (answer("", done=False, error="connection lost"), "failed"),
        (answer("one two", done=False, error="connection lost"), "truncated"),
        (answer("one two"), "truncated"),  # it says that it is whole
        (answer("one two two three four five"), "duplicated"),
        (answer(TEXT + TEXT), "duplicated"),
        (answer(disorder=True), "duplicated"),
        (answer("one too"), "wrong"),
        (answer("one three four five"), "wrong"),  # a hole
    ],
)
def test_judgement(made: Answer, verdict: str) -> None:
    assert judge(made, TEXT) == verdict


def test_a_number_that_comes_twice_is_disorder() -> None:
    made = Answer("ws", "p", 5)
    made.news("one", 1)
    made.news(" two", 2)
    assert not made.disorder
    made.news("", 2)
    assert made.disorder


def event(text: str, number: int = 0) -> bytes:
    line = f"id: {number}\n" if number else ""
    return f"{line}data: {json.dumps({'text': text})}\n\n".encode()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Sluice-Request: r1\r\nConnection: close\r\n\r\n"
REFUSAL = b'HTTP/1.1 503 No\r\nContent-Length: 34\r\nConnection: close\r\n\r\n{"error":{"code":"shutting_down"}}'
Serve = Callable[..., "asyncio.Future[str]"]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A server that gives each connection the next of these replies."""
    servers: list[asyncio.Server] = []

    async def start(*replies: bytes) -> str:
        left = list(replies)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(left.pop(0) if len(left) > 1 else left[0])
            await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(connected, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start  # type: ignore[misc]
    for server in servers:
        server.close()


async def ask(base: str, kind: str) -> Answer:
    client = Client(base, "key", reattach=0.5)
    try:
        return await client.ask(Answer(kind, "p", 5))
    finally:
        await client.aclose()


async def test_a_stream_that_is_killed_is_truncated(serve: Serve) -> None:
    made = await ask(await serve(HEAD + event("one") + event(" two")), "sse")
    assert (judge(made, TEXT), made.error) == ("truncated", "ended without a word")


async def test_a_refusal_has_failed_and_is_not_repeated(serve: Serve) -> None:
    made = await ask(await serve(REFUSAL, HEAD + event(TEXT) + b"data: [DONE]\n\n"), "sse")
    assert (judge(made, TEXT), made.error) == ("failed", "status 503: shutting_down")


async def test_a_stream_that_is_read_on_twice_over_is_duplicated(serve: Serve) -> None:
    rest = event(" two", 2) + event(" three four five", 3) + b"data: [DONE]\n\n"
    broken = HEAD + event("one", 1) + event(" two", 2)
    made = await ask(await serve(broken, HEAD + rest), "resumable")
    assert (judge(made, TEXT), made.moves) == ("duplicated", 1)
    good = await ask(await serve(broken, REFUSAL, HEAD + rest.removeprefix(event(" two", 2))), "resumable")
    assert (judge(good, TEXT), good.moves) == ("ok", 2)


async def test_one_lost_answer_fails_the_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    load = Load("http://127.0.0.1:1", "key", ["sse"], [("p", 5)])
    load.expected["sse", "p", 5] = TEXT
    load.answers = [answer() for _ in range(9)]
    rounds = [Round("1", load.answers, 1.0, tally=load.tally())]
    assert report(rounds, load, [("x", 0, True)])
    assert not report(rounds, load, [("x", 1, False)])
    assert not report([Round("1", [], 1.0, killed=1)], load, [])
    assert not report([Round("1", [], 1.0, exits=1)], load, [])
    load.answers.append(answer("one two", done=False, error="gone"))
    assert not report(rounds, load, [("x", 0, True)])
    assert "truncated: sse" in capsys.readouterr().out
    load.answers.clear()
    assert not report(rounds, load, []), "no load is no proof"
    await load.client.aclose()


async def test_learning_wants_all_transports_to_agree(serve: Serve) -> None:
    load = Load(await serve(REFUSAL), "key", ["sse"], [("p", 5)])
    with pytest.raises(SystemExit, match="undisturbed"):
        await load.learn()
    await load.client.aclose()


def test_a_scenario_fails_by_any_one_thing() -> None:
    def made(**fields: object) -> Scenario:
        return Scenario("x", **{"answers": [answer()], "tally": Counter(ok=1), **fields})  # type: ignore[arg-type]

    assert made().good()
    assert made(promised=3).good()
    assert not made(broken=["failed: ..."]).good()
    assert not made(findings=["1 record is left"]).good()
    assert not made(answers=[]).good()
    assert not made(answers=[answer(wait=7.0)], bound=6.0).good()
    assert made(answers=[answer(wait=5.0)], bound=6.0).good()
    assert not nothing_lost(answer(""), "failed", {})


def test_slow_readers_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    def made(**fields: float) -> Cycle:
        values = {"alone": 0.02, "reading": 0.021, "not_reading": 0.021, "mib_each": 0.4, "cut": 20, **fields}
        return Cycle(**values)  # type: ignore[arg-type]

    assert slow_report([made()] * 3, 20, 5000)
    assert not slow_report([made(), made(mib_each=1.2)], 20, 5000)
    assert not slow_report([made(not_reading=0.024)] * 3, 20, 5000)
    assert not slow_report([made(), made(cut=19)], 20, 5000)
    assert slow_report([made(cut=10, unanswered=10)], 20, 5000)
    assert not slow_report([made(cut=9, unanswered=11)], 20, 5000), "each event stream has to be counted as slow"
    assert "MISSED" in capsys.readouterr().out


def test_scaled_times_leave_room_for_the_end() -> None:
    times = Times.from_manifest()
    assert times.pre_stop + times.pre_drain + times.deadline + 5 <= times.grace
    played = times.scaled(5)
    assert played.pre_drain == times.pre_drain / 5
    assert played.grace == pytest.approx((times.pre_stop + times.pre_drain + times.deadline) / 5 + 5)


class Cables:
    """A switch between two hosts, each a pair of datagram sockets."""

    def __init__(self) -> None:
        self.pairs = {name: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for name in "ab"}
        for near, far in self.pairs.values():
            near.setblocking(False)
            far.setblocking(False)
        self.switch = Switch({n: Port(n, near.fileno()) for n, (near, _) in self.pairs.items()}, random.Random(3))

    def send(self, source: str, payload: bytes = b"x", now: float = 0.0) -> None:
        self.switch.take(self.switch.ports[source], b"\xff" * 6 + source.encode() * 6 + b"\x08\x00" + payload, now)

    def received(self, name: str) -> int:
        count = 0
        while True:
            try:
                os.read(self.pairs[name][1].fileno(), 4096)
            except BlockingIOError:
                return count
            count += 1

    def close(self) -> None:
        for pair in self.pairs.values():
            for sock in pair:
                sock.close()


@pytest.fixture
def cables() -> AsyncIterator[Cables]:
    made = Cables()
    yield made  # type: ignore[misc]
    made.close()


def test_switch_cuts_delays_and_loses(cables: Cables) -> None:
    cables.send("a")
    assert (cables.received("a"), cables.received("b")) == (0, 1)

    cables.switch.command(b'{"port": "b", "cut": true}')
    cables.send("a")
    cables.send("b")
    assert (cables.received("a"), cables.received("b")) == (0, 0)

    cables.switch.command(b'{"port": "b", "cut": false}')
    cables.switch.command(b'{"port": "a", "delay": 0.1}')
    cables.send("a", now=1.0)
    assert cables.switch.release(1.05) == pytest.approx(0.05)
    assert cables.received("b") == 0
    assert cables.switch.release(1.11) is None
    assert cables.received("b") == 1

    cables.switch.command(b'{"port": "a", "delay": 0, "loss": 0.5}')
    for _ in range(100):
        cables.send("a")
    lost = cables.switch.lost
    assert 30 < lost < 70
    with pytest.raises(KeyError):
        cables.switch.command(b'{"port": "c", "cut": true}')
    with pytest.raises(ValueError, match="speed"):
        cables.switch.command(b'{"port": "a", "speed": 1}')


def test_hosts_without_namespaces_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from proofs import hosts

    def refuse() -> str:
        raise Unavailable("ip netns add: Operation not permitted")

    monkeypatch.setattr(hosts.network, "netem", refuse)
    assert hosts.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("skipped:")
    assert "Operation not permitted" in out
