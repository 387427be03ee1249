"""``manage.py inflight``: what is in flight, cancel it, and prove that nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from django.core.management.base import CommandError

from inference.config import Config, host_name
from inference.lifecycle import Outcome, Reason
from inference.redisio import Commander, connect
from inference.store import RequestStore, RequestView, StoreViews
from inference.store.series import audit_and_remember
from sluice.command import NO_REDIS
from sluice.command import Command as SluiceCommand

_PAGE = 500


class Command(SluiceCommand):
    """Talks to Redis directly: works while every server is down."""

    help = "List the requests in flight; cancel one or all of them; audit every record, owner and index."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--cancel", metavar="ID", help="cancel one request (recorded as cancelled by an admin)")
        what.add_argument("--cancel-all", action="store_true", help="cancel everything in flight")
        what.add_argument(
            "--audit",
            action="store_true",
            help="compare records, owners, indexes and logs; exit status 1 where they disagree",
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        config = Config.from_env()
        if not config.redis_url:
            raise CommandError(NO_REDIS)
        status = asyncio.run(self._with_store(config, options))
        if status:
            sys.exit(status)

    async def _with_store(self, config: Config, options: dict[str, Any]) -> int:
        redis = Commander(
            lambda: connect(config.redis_url, timeout=config.redis_timeout, client_name="sluice-inflight"),
            name="inflight",
        )
        redis.start()
        store = RequestStore(redis, config, counts=False)
        action: Callable[[RequestStore, dict[str, Any]], Awaitable[int]] = self._list
        if options["audit"]:
            action = self._audit
        elif options["cancel"]:
            action = self._cancel
        elif options["cancel_all"]:
            action = self._cancel_all
        try:
            return await action(store, options)
        finally:
            await redis.stop()

    def _print(self, value: Any, as_json: bool, text: str) -> None:
        self.stdout.write(msgspec.json.encode(value).decode() if as_json else text)

    async def _list(self, store: RequestStore, options: dict[str, Any]) -> int:
        items = await _everything(StoreViews(store.redis, store.keys))
        now = await store.now_ms()
        rows = [f"{len(items)} in flight"]
        rows += [
            f"{v.id:40} {v.phase:9} {v.model:24} {v.endpoint}/{v.transport:5} {(now - v.created_ms) / 1000:8.1f} s "
            f"{v.prompt_tokens:6} + {v.generated_tokens:<6} {v.server or '-'} {v.worker or '-'} "
            f"attempt {v.attempt}{' ORPHANED' if v.orphaned else ''}"
            for v in items
        ]
        self._print(items, options["json"], "\n".join(rows))
        return 0

    async def _cancel(self, store: RequestStore, options: dict[str, Any]) -> int:
        request_id = options["cancel"]
        ending = await store.settle(request_id, Outcome.cancelled(Reason.ADMIN))
        if ending is None:
            self._print({"cancelled": []}, options["json"], f"{request_id} is not in flight")
            return 1
        self._print({"cancelled": [request_id]}, options["json"], f"cancelled {request_id}")
        return 0

    async def _cancel_all(self, store: RequestStore, options: dict[str, Any]) -> int:
        cancelled = [
            view.id
            for view in await _everything(StoreViews(store.redis, store.keys))
            if await store.settle(view.id, Outcome.cancelled(Reason.ADMIN)) is not None
        ]
        self._print({"cancelled": cancelled}, options["json"], f"cancelled {len(cancelled)} requests")
        return 0

    async def _audit(self, store: RequestStore, options: dict[str, Any]) -> int:
        report = await audit_and_remember(store, f"manage.py on {host_name()}")
        text = f"{report.records} records, {report.logs} token logs, {report.keys} keys: "
        text += "all in order" if report.clean else f"{len(report.findings)} findings\n" + "\n".join(report.findings)
        self._print(report, options["json"], text)
        return 0 if report.clean else 1


async def _everything(views: StoreViews) -> list[RequestView]:
    items: list[RequestView] = []
    offset = 0
    while True:
        page = await views.page(offset, _PAGE, newest_first=False)
        items += page.items
        offset += _PAGE
        if offset >= page.total:
            return items
