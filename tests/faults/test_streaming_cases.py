"""What clients read of a stream, on every transport: whole characters, stop texts, a pulse while nothing comes.

Guards: the incremental detokeniser, the search for stop texts that holds back what may
still become one, and the pings that keep an idle connection open.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.harness import Exchange, Proxy, Rig, Server
from tests.faults.transports import STREAMING, TRANSPORTS, Call

MakeRig = Callable[..., Any]

CHARACTERS = "Fjord \U0001f468‍\U0001f469‍\U0001f467‍\U0001f466 \U0001f1eb\U0001f1ee नमस्ते 한국어 漢字 ßé€ ok"
IDLE = 2.5
"""Seconds after which the load balancer of these tests gives up a silent connection; pings come every second."""


@pytest.fixture
async def site(make_rig: MakeRig) -> tuple[Rig, Server]:
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=200,say=1,faults=1,context=100000,slots=8")
    _, server = await asyncio.gather(rig.pool(), rig.server())
    return rig, server


def said(text: str) -> str:
    return f"[[say:{text}]]"


async def answer(rig: Rig, server: Server, kind: str, text: str, tokens: int, **fields: Any) -> Call:
    """One answer to its end. The scripted engine says ``text`` byte by byte."""
    call = await Call.begin(rig, server, kind, tokens, prompt=said(text), find=False, **fields)
    reply = await call.finish()
    assert (reply.error, reply.done) == (None, True)
    return call


async def test_st_01_characters_of_several_tokens_come_whole(site: tuple[Rig, Server]) -> None:
    """Every token is a byte; eight streams at once; no piece holds half a character."""
    rig, server = site
    size = len(CHARACTERS.encode())
    assert (await answer(rig, server, "json-chat", CHARACTERS, size)).reply.text == CHARACTERS
    for kind in TRANSPORTS:
        calls = await asyncio.gather(*(answer(rig, server, kind, CHARACTERS, size) for _ in range(8)))
        for call in calls:
            assert call.reply.text == CHARACTERS, kind
            assert not [piece for piece in call.reply.pieces if "�" in piece], kind
            for event in call.reply.events:
                assert event == "[DONE]" or json.loads(event)
            assert kind == "json-chat" or len(call.reply.pieces) > 20, "the text came in pieces"
    await rig.quiet()


async def test_st_01_a_limit_in_mid_character_shows_nothing_of_it(site: tuple[Rig, Server]) -> None:
    rig, server = site
    data = "aé한\U0001f680".encode()
    for kind in TRANSPORTS:
        for cut in range(1, len(data) + 1):
            reply = (await answer(rig, server, kind, data.decode(), cut)).reply
            assert (reply.text, reply.finish) == (data[:cut].decode(errors="ignore"), "length"), kind


STOPS: list[tuple[str, Any, str, str]] = [
    # (what the model says, stop, what is shown, finish)
    ("one two three four", ["three"], "one two ", "stop"),
    ("one two three four", "wo th", "one t", "stop"),  # begins and ends within words
    ("xaaabyaab", ["aab"], "xa", "stop"),  # overlaps itself
    ("nun sag 한국어 bitte", ["국"], "nun sag 한", "stop"),
    ("a b c d e f", ["zz", "e f", "d", "yy"], "a b c ", "stop"),  # the first that is met
    ("END almost EN", ["END."], "END almost EN", "length"),  # nearly, to the very end
    ("so near: STO STOQ", ["STOP"], "so near: STO STOQ", "length"),
    ("the end is here", ["here and now"], "the end is here", "length"),  # the limit comes within a match
]


async def test_st_03_stop_texts(site: tuple[Rig, Server]) -> None:
    """Nothing of a stop text is shown, and all of what only looked like one."""
    rig, server = site
    for kind in TRANSPORTS:
        for text, stop, shown, finish in STOPS:
            reply = (await answer(rig, server, kind, text, len(text.encode()), stop=stop)).reply
            assert (reply.text, reply.finish) == (shown, finish), (kind, text, stop)
            assert "" not in reply.pieces
    await rig.quiet()


async def test_st_03_what_is_held_back_makes_no_empty_events(site: tuple[Rig, Server]) -> None:
    """While a stop text may still come nothing is sent, not even an event without text."""
    rig, server = site
    for kind in STREAMING:
        events = (await answer(rig, server, kind, "b" + "a" * 60, 61, stop="a" * 64)).reply.events
        assert len(events) <= 7, f"{kind}: {events}"


async def test_st_03_an_empty_stop_text_is_refused(site: tuple[Rig, Server]) -> None:
    rig, server = site
    for kind in TRANSPORTS:
        for stop in ("", ["ok", ""]):
            call = await Call.begin(rig, server, kind, 8, prompt="x", find=False, stop=stop)
            reply = await call.finish()
            assert reply.error is not None and "stop" in json.dumps(reply.error), kind
            assert call.status in (400, 0)


class IdleCutter(Proxy):
    """A load balancer: resets a connection on which the server says nothing for ``IDLE`` seconds."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.cuts = 0

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        from_server = sink.get_extra_info("sockname")[1] == self.port
        try:
            while True:
                async with asyncio.timeout(IDLE if from_server else None):
                    data = await source.read(65536)
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()
        except TimeoutError:
            self.cuts += 1
            sink.transport.abort()
        except OSError:
            sink.transport.abort()
        finally:
            self._writers.discard(sink)


async def test_st_06_a_silent_stream_has_a_pulse(make_rig: MakeRig) -> None:
    """Waiting in the queue, and in a gap in mid-stream: no load balancer has reason to cut it."""
    slots = len(STREAMING)
    rig = await make_rig(
        SLUICE_MODELS=f"scripted=scripted:rate=40,context=100000,slots={slots}",
        # The worker will stand still for longer than it usually may.
        SLUICE_HEARTBEAT_INTERVAL=1,
        SLUICE_HEARTBEAT_TTL=30,
        SLUICE_STALL_TIMEOUT=60,
        SLUICE_WS_PING_INTERVAL=1,  # a WebSocket has pings of its own
    )
    _, server = await asyncio.gather(rig.pool(), rig.server())
    proxy = await IdleCutter(server.port).start()
    try:
        behind = Server(server.process, proxy.port, server.key)
        before = [await Call.begin(rig, server, "sse-generate", 90000) for _ in range(slots)]
        for call in before:
            call.reading()
            await rig.running(call.id)
        calls = [await Call.begin(rig, behind, kind, 100) for kind in STREAMING]  # they have headers, and no turn
        for call in calls:
            call.reading()
        await asyncio.sleep(2 * IDLE)  # so long a wait is the case itself
        for call in calls:
            assert (await rig.views.view(call.id)).state == "queued"
        for call in before:
            await call.leave()
        for call in calls:
            view = await rig.running(call.id, 5, 20)
        pid = await rig.worker_pid(view.worker)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2 * IDLE)  # here, too
        os.kill(pid, signal.SIGCONT)
        assert proxy.cuts == 0
        for call in calls:
            reply = await call.finish()
            assert (reply.done, reply.finish, reply.error) == (True, "length", None), call.kind
            assert not [piece for piece in reply.pieces if "ping" in piece]
    finally:
        await proxy.stop()
    await rig.quiet()


async def test_st_07_nothing_gathers_or_compresses_a_stream(make_rig: MakeRig) -> None:
    """With gzip allowed by the client, tokens still come one by one, at the pace of the engine."""
    rig = await make_rig(SLUICE_MODELS="scripted=scripted:rate=20,context=100000")
    _, server = await asyncio.gather(rig.pool(), rig.server())
    base: dict[str, Any] = {"model": "scripted", "max_tokens": 30, "ignore_eos": True, "stream": True}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/generate": {"prompt": "hi"},
    }

    async def arrivals(path: str, body: dict[str, Any]) -> list[float]:
        exchange = await Exchange.open(
            server.port, "POST", path, key=server.key, body=base | body, headers={"Accept-Encoding": "gzip, br"}
        )
        assert exchange.status == 200
        assert "content-encoding" not in exchange.headers
        assert "no-cache" in exchange.headers["cache-control"]
        assert exchange.headers["x-accel-buffering"] == "no"
        clock = asyncio.get_running_loop().time
        return [clock() async for data in exchange.events() if re.search(r'"(content|text)":"[^"]', data)]

    async def pieces() -> list[float]:
        return (await (await Call.begin(rig, server, "ws", 30)).finish()).times

    for waiting in [*(arrivals(path, body) for path, body in bodies.items()), pieces()]:
        at = await waiting
        assert len(at) > 20
        # At 20 a second, three that arrive within a hundredth of a second came together. What gathers does
        # that all the time, a busy machine now and then.
        together = [b - a for a, b in zip(at, at[2:], strict=False) if b - a < 0.01]
        assert len(together) < len(at) / 4, at
    await rig.quiet()
