"""Mixed load with every kind of ending and fault at once, then the proof that nothing is left.

``make soak`` sends 20,000 requests to real servers and workers; ``ARGS`` chooses:
``--requests N``, ``--minutes M`` (at least so long), ``--seed S``, ``--clients C``,
``--quick`` (about a minute). Prints a closing table; exit status 1 where a line of it fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.soak_proof import Proof
from benchmarks.soak_traffic import Traffic
from inference.store import audit
from tests.faults.harness import Rig
from tests.support import eventually


async def run(args: argparse.Namespace) -> bool:
    """The whole soak; true where every line of its table holds."""
    if args.quick:
        args.requests, args.clients = 600, 16
    settings = {
        "SLUICE_MODELS": "scripted=scripted:rate=200,prefill=0.5,faults=1,context=20000,slots=12",
        "SLUICE_HISTORY_SIZE": 10_000_000,
        "SLUICE_MAX_ATTEMPTS": 6,
        "SLUICE_RESUME_GRACE": 5,
        "SLUICE_LOG_RETENTION": 5,
        "SLUICE_PRE_DRAIN": 0,
    }
    with tempfile.TemporaryDirectory(prefix="sluice-soak-") as folder:
        async with Rig(Path(folder), **settings) as rig:
            traffic = Traffic(rig, args)
            await traffic.start()
            await traffic.send(min(200, args.requests // 4))
            await eventually(rig.is_quiet, 30, what="quiet after the warm-up")
            proof = Proof(traffic)
            await proof.begin()
            began = time.monotonic()
            stop = asyncio.Event()
            disturbing = asyncio.create_task(traffic.disturb(stop))
            await traffic.send(args.requests, args.minutes * 60)
            stop.set()
            await disturbing
            seconds = time.monotonic() - began
            await proof.close()
            good = proof.print(seconds)
            if not good:
                await _explain(rig)
            return good


async def _explain(rig: Rig) -> None:
    report = await audit(rig.store)
    print("\n".join(report.findings[:20]))
    for view in (await rig.views.page(0, 20)).items:
        print(view)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for at least so long")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", type=float, default=1.0, help="stretch the time between faults")
    parser.add_argument("--quick", action="store_true", help="about a minute: 600 requests")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``make soak``."""
    args = arguments().parse_args(argv)
    return 0 if asyncio.run(run(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
