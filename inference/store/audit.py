"""The audit: compares every record, owner and index with each other, in pages.

It changes nothing. What it finds and a reaper has not taken within
``heartbeat_ttl`` + ``reap_interval`` is a defect of this program.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from inference.redisio import Commander
from inference.store.store import RequestStore
from inference.store.views import StoreViews

_PAGE = 500
_PLACING = ("state", "server", "worker", "model", "finish", "resumable", "attempt")
_SINGLES = frozenset(
    "live deadlines detached servers workers pools restarts history outcomes usage usage:batch".split()
)


class AuditReport(msgspec.Struct, frozen=True):
    """What the audit found. ``findings`` is empty where all is in order."""

    findings: list[str]
    records: int
    logs: int
    keys: int
    checked_ms: int

    @property
    def clean(self) -> bool:
        return not self.findings


async def audit(store: RequestStore) -> AuditReport:
    """Look at every key under the prefix (SCAN, in pages) and every index entry."""
    run = _Audit(store)
    await run.keys_under_prefix()
    await run.records_against_owners()
    await run.indexes_against_records()
    return AuditReport(run.findings, len(run.records), run.logs, run.total, await store.now_ms())


class _Audit:
    def __init__(self, store: RequestStore) -> None:
        self.store = store
        self.redis: Commander = store.redis
        self.k = store.keys
        self.views = StoreViews(store.redis, store.keys)
        self.findings: list[str] = []
        self.records: dict[str, dict[str, str]] = {}
        self.queues: list[str] = []
        self.sets: list[str] = []
        self.logs = 0
        self.total = 0

    async def keys_under_prefix(self) -> None:
        prefix = self.k.prefix
        async for key in _scan(self.redis, prefix):
            self.total += 1
            name = key[len(prefix) :]
            if name.startswith("req:{"):
                await self._record(key, name[5:-1])
            elif name.startswith("log:{"):
                self.logs += 1
                await self._log(key, name[5:-1])
            elif name.startswith("end:{"):
                await self._has_ttl(key)
            elif name.startswith("queue:"):
                self.queues.append(key)
            elif name.startswith(("running:", "of:server:", "of:worker:")):
                self.sets.append(key)
            elif name.startswith(("beat:", "limit:", "series:", "ticket:")):
                await self._has_ttl(key)
            elif name.startswith("fair:"):
                if not await self.redis.call("EXISTS", self.k.queue(name[5:])):
                    await self._confirm(f"fairness state of {name[5:]} without a queue", key)
            elif name not in _SINGLES:
                self.findings.append(f"unknown key {name}")

    async def _record(self, key: str, request_id: str) -> None:
        if record := await self._read(key):
            self.records[request_id] = record

    async def _read(self, key: str) -> dict[str, str]:
        """What places a record; empty where there is none."""
        values = await self.redis.call("HMGET", key, *_PLACING)
        if values[0] is None:
            return {}
        return {f: (v or b"").decode() for f, v in zip(_PLACING, values, strict=True)}

    async def _log(self, key: str, request_id: str) -> None:
        record, ttl = await asyncio.gather(
            self.redis.call("EXISTS", self.k.request(request_id)), self.redis.call("PTTL", key)
        )
        if not record and ttl == -1:
            self.findings.append(f"token log of {request_id} without a request and without a TTL")

    async def _has_ttl(self, key: str) -> None:
        if await self.redis.call("PTTL", key) == -1:
            self.findings.append(f"{key[len(self.k.prefix) :]} has no TTL")

    async def _confirm(self, text: str, key: str) -> None:
        if await self.redis.call("EXISTS", key):
            self.findings.append(text)

    async def records_against_owners(self) -> None:
        (servers, _), (workers, _) = await asyncio.gather(self.views.alive("servers"), self.views.alive("workers"))
        for request_id, rec in list(self.records.items()):
            if not await self.redis.call("EXISTS", self.k.request(request_id)):
                del self.records[request_id]  # ended while the audit was running
                continue
            server, worker, state = rec["server"], rec["worker"], rec["state"]
            if server and server not in servers:
                self.findings.append(f"request {request_id}: its server {server} has no heartbeat")
            if not server and rec["resumable"] != "1":
                self.findings.append(f"request {request_id}: no server, and not resumable")
            if state == "running" and not rec["finish"] and worker not in workers:
                self.findings.append(f"request {request_id}: its worker {worker or '(none)'} has no heartbeat")
            await self._indexed(request_id, rec)

    async def _indexed(self, request_id: str, rec: dict[str, str]) -> None:
        checks: list[tuple[str, Any, str]] = [
            ("live", "ZSCORE", self.k.live),
            ("deadlines", "ZSCORE", self.k.deadlines),
        ]
        if rec["server"]:
            checks.append(("of:server", "SISMEMBER", self.k.of_server(rec["server"])))
        else:
            checks.append(("detached", "ZSCORE", self.k.detached))
        if rec["state"] == "queued":
            checks.append(("queue", "ZSCORE", self.k.queue(rec["model"])))
        elif not rec["finish"]:
            checks.append(("running", "SISMEMBER", self.k.running(rec["model"])))
            checks.append(("of:worker", "SISMEMBER", self.k.of_worker(rec["worker"])))
        replies = await asyncio.gather(*(self.redis.call(c, key, request_id) for _, c, key in checks))
        missing = [
            name
            for (name, command, _), reply in zip(checks, replies, strict=True)
            if reply is None or (command == "SISMEMBER" and not reply)
        ]
        if not missing:
            return
        state = await self.redis.call("HMGET", self.k.request(request_id), "state", "server", "finish")
        if [(v or b"").decode() for v in state] == [rec["state"], rec["server"], rec["finish"]]:
            self.findings.append(f"request {request_id}: missing in {', '.join(missing)}")

    async def indexes_against_records(self) -> None:
        for key in (self.k.live, self.k.deadlines, self.k.detached, *self.queues):
            async for member in _zscan(self.redis, key):
                await self._entry(key, member, "ZSCORE")
        for key in self.sets:
            for member in await self.redis.call("SMEMBERS", key):
                await self._entry(key, member.decode(), "SISMEMBER")

    async def _entry(self, key: str, request_id: str, command: str) -> None:
        name, record = key[len(self.k.prefix) :], self.records.get(request_id)
        if record and _belongs(name, record):
            return
        # It may have moved on since it was read. What is still so, and was so all the while, is no step under way.
        record = await self._read(self.k.request(request_id))
        if record and _belongs(name, record):
            return
        reply = await self.redis.call(command, key, request_id)
        if reply is None or (command == "SISMEMBER" and not reply):
            return
        if await self._read(self.k.request(request_id)) == record:
            why = "whose record says otherwise" if record else "which has no record"
            self.findings.append(f"{name} names {request_id}, {why}")


def _belongs(index: str, record: dict[str, str]) -> bool:
    """Whether an index entry of this name is one that the record calls for."""
    kind, _, name = index.partition(":")
    held = record["state"] == "running" and not record["finish"]
    match kind:
        case "queue":
            return record["state"] == "queued" and record["model"] == name
        case "running":
            return held and record["model"] == name
        case "of":
            return name == f"server:{record['server']}" or (held and name == f"worker:{record['worker']}")
        case "detached":
            return not record["server"]
    return True


async def _scan(redis: Commander, prefix: str) -> AsyncIterator[str]:
    pattern = "".join(f"\\{c}" if c in "[]*?^\\" else c for c in prefix) + "*"
    cursor: Any = 0
    seen: set[bytes] = set()
    while True:
        cursor, page = await redis.call("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)
        for key in page:
            if key not in seen:
                seen.add(key)
                yield key.decode()
        if int(cursor) == 0:
            return


async def _zscan(redis: Commander, key: str) -> AsyncIterator[str]:
    cursor: Any = 0
    while True:
        cursor, flat = await redis.call("ZSCAN", key, cursor, "COUNT", _PAGE)
        for member, _score in flat:
            yield member.decode()
        if int(cursor) == 0:
            return
