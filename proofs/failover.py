"""``make prove-failover``: one stream whose worker is killed again and again, and its text is the undisturbed one.

A server and a pool of workers with a real model in float32. One greedy stream; after every twenty tokens
the worker that generates it is killed with SIGKILL. Another worker goes on
from the logged tokens. Prints a row per kill; exit status 1 where the text is not byte for byte that of
the same request without kills.

    python -m proofs.failover [--kills 20] [--model ALIAS=TARGET] [--device cuda:0] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.harness import Rig
from tests.faults.transports import Call
from tests.support import eventually

PROMPT = "Tell me a long story about a lighthouse and the sea."
APART = 20
"""Tokens between two kills."""
WORKERS = 3
PATIENCE = 150.0
"""Seconds that a stream may take to go on: a killed worker loads its model anew."""


@dataclass
class Kill:
    """One kill of the worker in mid-stream.

    Attributes:
        worker, successor: process ids.
        at: characters that the client had received by then.
        gap: seconds from the kill to the next text of another worker.
        before, after: the text on both sides of the cut.
    """

    number: int
    worker: int
    successor: int
    gap: float
    at: int
    before: str = ""
    after: str = ""


@dataclass
class Proof:
    """What came of it. ``whole`` is the undisturbed text, ``text`` the one with kills."""

    whole: str = ""
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    tokens: int = 0
    attempts: int = 0
    kills: list[Kill] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return self.text == self.whole and self.error is None and self.finish == "length"

    def table(self) -> str:
        """Markdown, a row per kill."""
        lines = [
            "| kill | worker | goes on in | received | gap, s | text around the cut |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {k.number} | {k.worker} | {k.successor} | {len(self.text[: k.at].encode())} bytes | {k.gap:.2f} "
            f"| {_cell(k.before)} ✂ {_cell(k.after)} |"
            for k in self.kills
        ]
        return "\n".join(lines)

    def verdict(self) -> str:
        """One line: how many kills, and whether the texts are equal."""
        size, digest = len(self.text.encode()), hashlib.sha256(self.text.encode()).hexdigest()[:16]
        other = hashlib.sha256(self.whole.encode()).hexdigest()[:16]
        word = "equal to" if self.same else f"NOT (error {self.error}, finish {self.finish})"
        return (
            f"{len(self.kills)} kills, {self.tokens} tokens, {size} bytes, sha256 {digest}: {word} "
            f"the undisturbed answer ({len(self.whole.encode())} bytes, sha256 {other})"
        )


def _cell(text: str) -> str:
    return text.replace("\n", "⏎").replace("|", "\\|").strip(" ")


async def prove(
    folder: Path,
    *,
    models: str,
    device: str = "cpu",
    kills: int = 20,
    say: Callable[[str], None] = lambda line: None,
    **fields: Any,
) -> Proof:
    """Run it. ``models`` has one alias; ``fields`` go into the request (greedy without)."""
    alias = models.partition("=")[0]
    tokens = APART * (kills + 2)
    settings = {
        "SLUICE_MODELS": models,
        "SLUICE_DEVICES": device,
        "SLUICE_WORKERS_PER_DEVICE": WORKERS,
        "SLUICE_DTYPE": "float32",
        "SLUICE_MAX_RUNNING": 4,
        "SLUICE_CACHE_TOKENS": 4096,
        "SLUICE_MAX_ATTEMPTS": kills + 2,
        # The usual ones: those of the rig are made for an engine that computes nothing.
        "SLUICE_HEARTBEAT_INTERVAL": 1,
        "SLUICE_HEARTBEAT_TTL": 5,
    }
    fields = {"model": alias, "prompt": PROMPT, **fields}
    proof = Proof(tokens=tokens)
    async with Rig(folder, **settings) as rig:
        _, server = await asyncio.gather(rig.pool(WORKERS), rig.server())
        say(f"{WORKERS} workers and a server are up; the undisturbed answer comes first")
        proof.whole = (await (await Call.begin(rig, server, "sse-generate", tokens, **fields)).finish(PATIENCE)).text
        call = await Call.begin(rig, server, "sse-generate", tokens, **fields)
        call.reading()
        for number in range(1, kills + 1):
            await rig.running(call.id, APART * number, PATIENCE)
            proof.kills.append(await _kill(rig, call, number))
            say(f"kill {number}: worker {proof.kills[-1].worker}, gap {proof.kills[-1].gap:.2f} s")
        reply = await call.finish(PATIENCE)
        proof.text, proof.finish, proof.error = reply.text, reply.finish, reply.error
        for kill in proof.kills:
            kill.before, kill.after = proof.text[max(0, kill.at - 18) : kill.at], proof.text[kill.at : kill.at + 18]
        ending = await rig.ending(call.id)
        proof.attempts = ending.attempts
    return proof


async def _kill(rig: Rig, call: Call, number: int) -> Kill:
    """Kill the worker that generates, and wait for text of another."""

    async def runs() -> Any:
        view = await rig.views.view(call.id)
        return view if view is not None and view.state == "running" else None

    worker = (await eventually(runs, PATIENCE, what="the request runs")).worker
    pid = await rig.worker_pid(worker)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    at = len(call.reply.text)

    async def elsewhere() -> Any:
        view = await runs()
        return view if view is not None and view.worker != worker else None

    view = await eventually(elsewhere, PATIENCE, what="another worker has it")
    seen = len(call.reply.pieces)
    await call.pieces(seen + 1, PATIENCE)
    gap = time.monotonic() - began
    return Kill(number, pid, await rig.worker_pid(view.worker), gap, at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--model", default="m=default", help="ALIAS=TARGET as in SLUICE_MODELS; default: the fetched one"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, help="sample with this seed and temperature 0.8, instead of greedily")
    options = parser.parse_args()
    fields = {} if options.seed is None else {"seed": options.seed, "temperature": 0.8}
    with tempfile.TemporaryDirectory() as folder:
        proof = asyncio.run(
            prove(
                Path(folder),
                models=options.model,
                device=options.device,
                kills=options.kills,
                say=lambda line: print(line, file=sys.stderr, flush=True),
                **fields,
            )
        )
    print(proof.table())
    print()
    print(proof.verdict())
    return 0 if proof.same else 1


if __name__ == "__main__":
    sys.exit(main())
