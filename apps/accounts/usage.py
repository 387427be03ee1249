"""Usage records: what each key and user has used, per day and model, each request exactly once.

The script that ends a request also counts it in Redis: a request ends once, so it
is counted once, whichever process ends it, and no process keeps a count that a
crash could lose. Servers move the counts to the database in batches. A batch has
an id; its row is written in the transaction that adds its counts, so that a batch
which several servers see, or one sees twice, is added once.
"""

from __future__ import annotations

import asyncio
import csv
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from django.contrib.auth import get_user_model
from django.db import DatabaseError, IntegrityError, close_old_connections, connection, transaction
from django.db.models import F, Sum
from django.utils import timezone

from apps.accounts.models import ApiKey, UsageBatch, UsageRecord
from inference.config import Config
from inference.errors import StoreUnavailable
from inference.keys import Keys
from inference.redisio import Commander, Script, connect

logger = logging.getLogger(__name__)

_LUA = Path(__file__).parent / "lua"
TAKE, DONE = Script(_LUA / "usage_take.lua"), Script(_LUA / "usage_done.lua")

INTERVAL = 5.0
"""Seconds between batches."""
PURGE_INTERVAL = 3600.0
"""Seconds between looks for texts that are past their time (:mod:`apps.accounts.retention`)."""
REMEMBERED = timedelta(days=7)
"""How long the ids of added batches are kept: far longer than a server can be stuck between its two steps."""

_EPOCH = date(1970, 1, 1)
_COLUMNS = {b"r": "requests", b"p": "prompt_tokens", b"g": "generated_tokens"}

Account = tuple[date, str, str]
Counts = dict[str, int]


class UsageCollector:
    """Moves usage from Redis to the database, every :data:`INTERVAL` and once more at the stop.

    Between two batches it also deletes, once an hour, what is kept no longer.

    It has a connection of its own, so that it can be stopped after everything that ends requests.
    """

    def __init__(self, config: Config) -> None:
        self._redis = Commander(
            lambda: connect(config.redis_url, timeout=config.redis_timeout, client_name="sluice-usage"), name="usage"
        )
        self._keys = Keys(config.redis_prefix)
        self._task: asyncio.Task[None] | None = None
        self._round: asyncio.Task[None] | None = None
        self._purge_at = 0.0
        self._failing = False

    def start(self) -> None:
        if self._task is None:
            self._redis.start()
            self._task = asyncio.create_task(self._run(), name="usage")

    async def stop(self, timeout: float = 3.0) -> None:
        """Move what is there, within ``timeout`` seconds; the rest waits in Redis for the next server."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            async with asyncio.timeout(timeout):
                if self._round is not None:
                    await self._round
                await self._try_collect()
        except TimeoutError:
            logger.warning("the last usage is left to the next server", extra={"event": "usage_late"})
        await self._redis.stop()

    async def collect(self) -> int:
        """Move one batch; gives how many accounts it had.

        Raises:
            StoreUnavailable: Redis does not answer.
            DatabaseError: the database does not; the batch waits in Redis.
        """
        flat = await self._redis.script(TAKE, [self._keys.usage, self._keys.usage_batch], [secrets.token_hex(12)])
        if not flat:
            return 0
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        batch = fields.pop(b"id").decode()
        accounts = _accounts(fields)
        # Off the loop, and not in the thread that every other use of the database shares.
        await asyncio.to_thread(_add_and_close, batch, accounts)
        await self._redis.script(DONE, [self._keys.usage_batch], [batch])
        return len(accounts)

    async def _run(self) -> None:
        while True:
            # Shielded: cancelling it would not stop its thread, and the round of the stop would meet that
            # in the database.
            self._round = asyncio.create_task(self._once(), name="usage-round")
            await asyncio.shield(self._round)
            await asyncio.sleep(INTERVAL)

    async def _once(self) -> None:
        await self._try_collect()
        if (now := time.monotonic()) >= self._purge_at:
            self._purge_at = now + PURGE_INTERVAL
            await self._purge()

    async def _purge(self) -> None:
        try:
            await asyncio.to_thread(_purge_and_close)
        except DatabaseError as exc:
            logger.warning("old texts could not be deleted (%s)", type(exc).__name__, extra={"event": "purge_failed"})

    async def _try_collect(self) -> None:
        try:
            await self.collect()
        except (StoreUnavailable, DatabaseError) as exc:
            if not self._failing:
                logger.warning("usage waits in Redis (%s)", type(exc).__name__, extra={"event": "usage_waits"})
            self._failing = True
        else:
            self._failing = False


def add(batch: str, accounts: dict[Account, Counts]) -> bool:
    """Add a batch to the records; ``False`` where that has been done before."""
    now = timezone.now()
    try:
        with transaction.atomic():
            UsageBatch.objects.bulk_create([UsageBatch(id=batch, added_at=now)])
            for (day, owner, model), counts in sorted(accounts.items()):
                record = UsageRecord.objects.filter(day=day, owner=owner, model=model)
                if not record.update(**{name: F(name) + n for name, n in counts.items()}):
                    UsageRecord.objects.create(day=day, owner=owner, model=model, **counts)
            UsageBatch.objects.filter(added_at__lt=now - REMEMBERED).delete()
    except IntegrityError:
        if UsageBatch.objects.filter(pk=batch).exists():
            return False
        raise
    return True


def _add_and_close(batch: str, accounts: dict[Account, Counts]) -> None:
    close_old_connections()
    try:
        add(batch, accounts)
    finally:
        connection.close()  # the thread may never come back


def _purge_and_close() -> None:
    from apps.accounts.retention import purge
    from sluice.conf import server_config

    close_old_connections()
    try:
        purge(server_config().retention_days)
    finally:
        connection.close()


def _accounts(fields: dict[bytes, bytes]) -> dict[Account, Counts]:
    out: dict[Account, Counts] = {}
    for name, value in fields.items():
        kind, day, owner, model = name.split(b"|", 3)
        account = (_EPOCH + timedelta(days=int(day)), owner.decode()[:80], model.decode()[:200])
        counts = out.setdefault(account, {})
        counts[_COLUMNS[kind]] = counts.get(_COLUMNS[kind], 0) + int(value)
    return out


# --- Reading ---


def of_user(user: Any, days: int) -> list[dict[str, Any]]:
    """What a user has used in the last ``days`` days (UTC, today included), newest first: one row per day and model.

    Sessions and all keys of the user together, revoked keys included.
    """
    owners = [f"user:{user.pk}", *(f"key:{p}" for p in ApiKey.objects.for_user(user).values_list("prefix", flat=True))]
    since = datetime.now(UTC).date() - timedelta(days=days - 1)
    mine = UsageRecord.objects.filter(owner__in=owners, day__gte=since).order_by("-day", "model").values("day", "model")
    found = mine.annotate(**{f"all_{name}": Sum(name) for name in _COLUMNS.values()})
    return [{k.removeprefix("all_"): v for k, v in row.items()} for row in found]


MAX_LABEL = 24
"""Longer labels are of no key or user; a number in one might be more than a database takes."""
CSV_COLUMNS = ["day", "owner", "name", "model", "requests", "prompt_tokens", "generated_tokens"]


def names_of(owners: Iterable[str]) -> dict[str, str]:
    """Names of keys and users for labels like ``key:<prefix>`` and ``user:<id>``; unknown ones are left out.

    Two queries at most.
    """
    names: dict[str, str] = {}
    known = {o for o in owners if len(o) < MAX_LABEL}
    if prefixes := [o.removeprefix("key:") for o in known if o.startswith("key:")]:
        keys = ApiKey.objects.filter(prefix__in=prefixes).values_list("prefix", "name")
        names.update((f"key:{prefix}", name) for prefix, name in keys)
    if ids := [int(i) for o in known if o.startswith("user:") and (i := o.removeprefix("user:")).isdecimal()]:
        users = get_user_model()
        rows = users._default_manager.filter(pk__in=ids).values_list("pk", users.USERNAME_FIELD)
        names.update((f"user:{pk}", name) for pk, name in rows)
    return names


def rows(records: Any) -> Iterator[list[str]]:
    """Records as lines of :data:`CSV_COLUMNS`."""
    owners = set(records.order_by().values_list("owner", flat=True).distinct())
    names = names_of(owners)
    for r in records.iterator():
        line = [r.day.isoformat(), r.owner, names.get(r.owner, ""), r.model]
        yield [*map(_harmless, line), str(r.requests), str(r.prompt_tokens), str(r.generated_tokens)]


def write_csv(records: Any, out: TextIO | Any) -> None:
    """Write records with a header line."""
    writer = csv.writer(out)
    writer.writerow(CSV_COLUMNS)
    writer.writerows(rows(records))


def _harmless(text: str) -> str:
    """A spreadsheet would calculate with what starts like this; a key's name is its owner's choice."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
