"""Stands in for a server: a process that receives a worker's frames and does nothing with them.

Python without torch, so that it takes little from the cores that the worker computes on::

    python -m benchmarks.receiver REDIS_URL CHANNEL
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import redis

from inference.messages import Step, decode_frame, decode_server_message


class Receiver:
    """A process that listens as a server does, and tells when each answer began and ended.

    Its clock is the system's monotonic one, which all processes share.
    """

    def __init__(self, url: str, channel: str) -> None:
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._command = [sys.executable, "-m", "benchmarks.receiver", url, channel]

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        await self._process.stdout.readline()
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            word, name, at = line.decode().split()
            (self.began if word == "began" else self.ended)[name] = float(at)
            self._changed.set()

    async def all_ended(self, names: Sequence[str]) -> None:
        while not self.ended.keys() >= set(names):
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        self._process.terminate()
        await self._process.wait()
        await self._reading


def main(url: str, channel: str) -> None:
    """The receiving process: one line when an answer begins and one when it ends."""
    pubsub = redis.Redis.from_url(url).pubsub()
    pubsub.subscribe(channel)
    begun: set[str] = set()
    for message in pubsub.listen():
        if message["type"] == "subscribe":
            print("listening", flush=True)
            continue
        step = decode_server_message(message["data"])
        at = time.monotonic()
        if not isinstance(step, Step):
            continue
        for part in step.frames:
            if part.id not in begun:
                begun.add(part.id)
                print("began", part.id, at, flush=True)
            if decode_frame(part.frame).finish is not None:
                print("ended", part.id, at, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
