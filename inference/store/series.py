"""What was going on during the last hour, and the last audits: bounded lists in Redis with a TTL.

Nothing here is written per request. A sample carries the counters of endings
as they stood, so that the endings of any span are the difference of two samples.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from inference.errors import SluiceError
from inference.keys import Keys
from inference.messages import encode
from inference.redisio import Commander, Script
from inference.store.audit import AuditReport, audit
from inference.store.store import RequestStore

logger = logging.getLogger("sluice.audit")

SAMPLE = Script(Path(__file__).parent / "lua" / "sample.lua")

PERIOD = 10.0
"""Seconds between samples."""
SPAN = 3600.0
"""Seconds that the series reaches back."""
_LOOK = 200
"""Endings whose TTFT one sample takes into account, at most."""
_AUDITS = 20
_AUDIT_TTL = 7 * 24 * 3600.0
_FINDINGS = 100


class Sample(msgspec.Struct, frozen=True):
    """The system at one moment.

    Attributes:
        at_ms: Redis clock.
        inflight: live requests, of which ``running`` were with a worker.
        rate: tokens/s of all workers since the sampling server's look before.
        ttft_p50: ms, of the requests that ended since the last sample (at most
            the last 200); -1 where there were none. ``ttft_p95`` likewise.
        outcomes: endings since the store was created, by ``state:reason``.
    """

    at_ms: int
    inflight: int
    running: int
    rate: float
    ttft_p50: float
    ttft_p95: float
    outcomes: dict[str, int] = {}


class AuditRun(msgspec.Struct, frozen=True):
    """One audit as it is remembered: ``found`` findings, the first hundred of them in ``report``."""

    report: AuditReport
    took_ms: float
    found: int
    by: str = ""


_decode_sample = msgspec.msgpack.Decoder(Sample, strict=False).decode
_decode_run = msgspec.msgpack.Decoder(AuditRun).decode


async def audit_and_remember(store: RequestStore, by: str) -> AuditReport:
    """Compare all records, owners and indexes, and keep the result for operators: the one way to audit.

    ``by`` says who asked. What cannot be kept (Redis is full, say) is reported all the same.
    """
    started = time.monotonic()
    report = await audit(store)
    try:
        await Series(store.redis, store.keys).remember_audit(report, (time.monotonic() - started) * 1000, by)
    except SluiceError as exc:
        logger.warning("the audit is not remembered: %s", exc, extra={"event": "audit_not_kept"})
    return report


class Series:
    """Reads and writes the series. Every method raises StoreUnavailable where Redis does not answer."""

    def __init__(self, commander: Commander, keys: Keys, *, period: float = PERIOD) -> None:
        self.redis = commander
        self.keys = keys
        self.period = period
        self._keep = int(SPAN / PERIOD) + 1
        self._load = f"{keys.prefix}series:load"
        self._audits = f"{keys.prefix}series:audits"

    async def sample(self, rate: float, running: int) -> bool:
        """Append a sample unless there is one from this period; whether this call did."""
        # A little less than the period: callers are not exact to the millisecond.
        args = [round(self.period * 900), self._keep, round(2 * SPAN * 1000), f"{rate:.3f}", running, _LOOK]
        keys = [self._load, self.keys.live, self.keys.outcomes, self.keys.history]
        return bool(await self.redis.script(SAMPLE, keys, args))

    async def load(self) -> list[Sample]:
        """All samples, oldest first."""
        return [_decode_sample(raw) for raw in reversed(await self.redis.call("LRANGE", self._load, 0, -1))]

    async def remember_audit(self, report: AuditReport, took_ms: float, by: str) -> None:
        """Keep the result of an audit, with its first hundred findings, for a week among the last twenty."""
        short = msgspec.structs.replace(report, findings=report.findings[:_FINDINGS])
        run = AuditRun(short, took_ms, len(report.findings), by)
        await self.redis.call("LPUSH", self._audits, encode(run))
        await self.redis.call("LTRIM", self._audits, 0, _AUDITS - 1)
        await self.redis.call("PEXPIRE", self._audits, round(_AUDIT_TTL * 1000))

    async def audits(self) -> list[AuditRun]:
        """The last audits of any process, newest first."""
        return [_decode_run(raw) for raw in await self.redis.call("LRANGE", self._audits, 0, -1)]
