"""``manage.py drain``: have API servers step aside, and come back."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from inference.config import Config
from inference.messages import ServerBeat, ServerCommand, encode
from inference.redisio import Commander, connect
from inference.store import RequestStore, StoreViews
from sluice.command import NO_REDIS
from sluice.command import Command as SluiceCommand


class Command(SluiceCommand):
    """Talks to Redis directly; the servers hear it from there."""

    help = (
        "Drain API servers without a signal: they stop taking new work and finish what runs, but do not exit. "
        "Without arguments, list the servers."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("servers", nargs="*", metavar="SERVER", help="ids of servers, as the list shows them")
        parser.add_argument("--all", action="store_true", help="all servers")
        parser.add_argument("--undo", action="store_true", help="serve again")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["all"] and options["servers"]:
            raise CommandError(f"--all is every server; leave it out to mean {' '.join(options['servers'])}")
        if options["undo"] and not (options["all"] or options["servers"]):
            raise CommandError(
                "--undo needs to know for whom: name servers (manage.py drain lists them), or give --all"
            )
        config = Config.from_env()
        if not config.redis_url:
            raise CommandError(NO_REDIS)
        asyncio.run(self._run(config, options))

    async def _run(self, config: Config, options: dict[str, Any]) -> None:
        def dial() -> Any:
            return connect(config.redis_url, timeout=config.redis_timeout, client_name="sluice-drain")

        redis = Commander(dial, name="drain")
        redis.start()
        try:
            store = RequestStore(redis, config, counts=False)
            servers = {server.id: server for server in await StoreViews(redis, store.keys).servers()}
            if not options["servers"] and not options["all"]:
                self._list(list(servers.values()))
                return
            wanted = list(servers) if options["all"] else options["servers"]
            if unknown := [name for name in wanted if name not in servers]:
                raise CommandError(f"There is no server {unknown[0]!r}. manage.py drain lists them.")
            verb = "undrain" if options["undo"] else "drain"
            for name in wanted:
                heard = await store.tell_server(name, encode(ServerCommand(verb)))
                self.stdout.write(f"{name}: {'told to ' + verb if heard else 'does not listen'}")
        finally:
            await redis.stop()

    def _list(self, servers: list[ServerBeat]) -> None:
        for s in servers:
            left = "" if s.drain_left_seconds is None else f"  {s.drain_left_seconds:.0f} s left"
            open_ = sum(s.exchanges.values())
            self.stdout.write(
                f"{s.id}  {s.host} pid {s.pid}  {s.state}  {s.streams} streams, {open_} exchanges open{left}"
            )
        if not servers:
            self.stdout.write("No server is running.")
