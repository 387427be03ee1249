"""The traffic of a soak: requests with every ending, over every transport, while things are killed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from typing import Any

from websockets.exceptions import WebSocketException

from inference.errors import StoreUnavailable
from tests.faults.harness import Exchange, Process, Rig, Server
from tests.faults.transports import STREAMING, TRANSPORTS, Call

ENDINGS = {
    "finish": 45,
    "disconnect at once": 8,
    "disconnect in decode": 12,
    "cancel at once": 8,
    "cancel in decode": 12,
    "deadline": 7,
    "resumable, left and read on": 5,
    "engine error": 3,
}
FAULTS = {"worker SIGKILL": 4, "server SIGKILL": 2, "Redis connections killed": 3, "Redis paused 1 s": 1}


class Traffic:
    """The deployment of one run, what was sent to it, and what came of it."""

    def __init__(self, rig: Rig, args: argparse.Namespace) -> None:
        self.rig = rig
        self.args = args
        self.chance = random.Random(args.seed)
        self.servers: list[Server] = []
        self.pools: list[Process] = []
        self.sent: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()
        self.ids: dict[str, str] = {}
        self.wrong: list[str] = []

    async def start(self) -> None:
        """Two pools with one worker each, two servers of which the first is never killed."""
        self.pools = list(await asyncio.gather(self.rig.pool(), self.rig.pool()))
        self.servers = [await self.rig.server(), await self.rig.server()]

    # -- one request ---------------------------------------------------------------------------------

    async def one(self, ending: str) -> None:
        self.sent[ending] += 1
        server = self.chance.choice(self.servers)
        try:
            async with asyncio.timeout(90):
                await self._one(ending, server)
        except TimeoutError:
            self.wrong.append(f"{ending}: no end within 90 s")
        except (OSError, asyncio.IncompleteReadError, WebSocketException):
            self.replies["connection lost"] += 1

    async def _one(self, ending: str, server: Server) -> None:
        chance = self.chance
        resumable = ending.startswith("resumable")
        kind = chance.choice(STREAMING if "cancel" in ending else TRANSPORTS)
        kind = "sse-generate" if resumable else kind
        fields: dict[str, Any] = {"resumable": True} if resumable else {}
        if ending == "deadline":
            fields["timeout"] = chance.uniform(0.05, 0.6)
        tokens = chance.choice((1, 5, 20, 60)) if ending == "finish" else chance.choice((200, 2000))
        tokens = 100 if resumable else tokens
        prompt = "[[error@3]]" if ending == "engine error" else "x" * chance.choice((5, 50, 400))
        call = await Call.begin(self.rig, server, kind, tokens, prompt=prompt, find=False, **fields)
        if ending == "disconnect at once":
            await asyncio.sleep(chance.random() * 0.05)
            await call.leave()
        elif ending == "disconnect in decode":
            await self._some(call)
            await call.leave()
        elif resumable:
            await self._some(call)
            await call.leave()
            await self._read_on(call)
        elif ending.startswith("cancel"):
            if ending == "cancel in decode":
                await self._some(call)
            await self._cancel(call)
            await self._end(call, ending)
        else:
            await self._end(call, ending)
        if call.id:
            self.ids[call.id] = ending

    async def _some(self, call: Call) -> None:
        """Until a few pieces have come, or the response has ended."""
        reading = call.reading()
        want = self.chance.randint(1, 5)
        while len(call.reply.pieces) < want and not reading.done():
            await asyncio.wait([reading], timeout=0.02)

    async def _cancel(self, call: Call) -> None:
        reading = call.reading()
        while not call.id and not reading.done():
            await asyncio.wait([reading], timeout=0.01)
        if not call.id:
            return
        for _ in range(self.chance.choice((1, 1, 2))):
            exchange = await self.servers[0].post(f"/v1/requests/{call.id}/cancel", {})
            if exchange.status not in (200, 404, 503):
                self.wrong.append(f"cancel answered {exchange.status}")
            await exchange.close()

    async def _read_on(self, call: Call) -> None:
        if not call.id:
            return
        exchange = await Exchange.open(self.servers[0].port, "GET", f"/v1/requests/{call.id}/events", key=self.rig.key)
        if exchange.status == 200:
            events = [e async for e in exchange.events()]
            self.replies["read on to the end" if events and events[-1] == "[DONE]" else "read on: error"] += 1
        else:
            self.replies[f"read on: {exchange.status}"] += 1
        await exchange.close()

    async def _end(self, call: Call, ending: str) -> None:
        reply = await call.finish(80)
        if reply.done:
            self.replies["complete"] += 1
        elif reply.error is not None:
            self.replies[f"error {reply.error.get('code')}"] += 1
        elif call.exchange is not None and call.status == 200:
            self.wrong.append(f"{ending} ({call.kind}): ended with neither [DONE] nor an error")
        if call.exchange is not None:
            await call.exchange.close()

    # -- faults --------------------------------------------------------------------------------------

    async def disturb(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.chance.uniform(2.0, 6.0) * self.args.calm):
                    await stop.wait()
                    return
            kind = self.chance.choices(list(FAULTS), list(FAULTS.values()))[0]
            try:
                await self._fault(kind)
            except StoreUnavailable:
                continue
            self.faults[kind] += 1

    async def _fault(self, kind: str) -> None:
        if kind == "worker SIGKILL":
            workers = [w for w in await self.rig.views.workers() if w.state == "ready"]
            if len(workers) > 1:
                os.kill(self.chance.choice(workers).pid, signal.SIGKILL)
        elif kind == "server SIGKILL":
            self.servers[1].process.signal(signal.SIGKILL)
            self.servers[1] = self.servers[0]
            self.servers[1] = await self.rig.server()
        elif kind == "Redis paused 1 s":
            self.rig.valkey.signal(signal.SIGSTOP)
            await asyncio.sleep(1)
            self.rig.valkey.signal(signal.SIGCONT)
        else:
            which = self.chance.choice(("normal", "pubsub"))
            await self.rig.redis.call("CLIENT", "KILL", "TYPE", which, "SKIPME", "yes")

    # -- load ----------------------------------------------------------------------------------------

    async def send(self, requests: int, seconds: float = 0.0) -> None:
        began, sent = time.monotonic(), 0

        async def client() -> None:
            nonlocal sent
            while sent < requests or time.monotonic() - began < seconds:
                sent += 1
                if sent % 1000 == 0:
                    print(f"  {sent} requests, {time.monotonic() - began:.0f} s", flush=True)
                await self.one(self.chance.choices(list(ENDINGS), list(ENDINGS.values()))[0])

        await asyncio.gather(*(client() for _ in range(self.args.clients)))
