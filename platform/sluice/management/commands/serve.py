"""``manage.py serve``: the API server."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import CommandError

from inference.config import Config
from inference.errors import ConfigError
from sluice import conf
from sluice.command import Command as SluiceCommand
from sluice.conf import ServerConfig

#: Files beside the clients' connections: Redis, the database, logs, static files.
SPARE_FILES = 256

EPILOG = """
Every flag has a setting (SLUICE_<NAME> in the environment); the flag wins.

On SIGTERM the server drains: for --pre-drain seconds readiness (/readyz) is false while
everything is still served, then new work gets 503 and what runs may finish within
--drain-deadline seconds; what is left then is ended with an error event and settled.
A second SIGTERM skips the waiting, SIGINT (Ctrl-C) skips the pause.
"""


class Command(SluiceCommand):
    help = "Serve the API, the chat page and the admin. Needs REDIS_URL; workers run elsewhere (runworker)."
    # The database is asked below, with one clear line instead of a traceback.
    requires_system_checks = []

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(
            prog_name, subcommand, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter, **kwargs
        )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
        parser.add_argument("--port", type=int, help="port to listen on, 0 for any (default 8000)")
        parser.add_argument(
            "--processes", type=int, metavar="N", help="server processes on this port (default 1); SIGHUP reloads them"
        )
        parser.add_argument("--fd", type=int, help=SUPPRESS)
        parser.add_argument("--ready-fd", type=int, help=SUPPRESS)
        parser.add_argument(
            "--pre-drain", type=float, metavar="S", help="seconds not ready before refusing (default 5)"
        )
        parser.add_argument(
            "--drain-deadline", type=float, metavar="S", help="seconds that running work may take (default 30)"
        )
        parser.add_argument(
            "--termination-grace",
            type=float,
            metavar="S",
            help="seconds the platform allows between SIGTERM and SIGKILL; only checked (default: unknown)",
        )
        parser.add_argument("--send-timeout", type=float, metavar="S", help="cut clients that do not read (default 60)")
        parser.add_argument("--max-connections", type=int, metavar="N", help="open connections (default 4096)")

    def handle(self, **options: Any) -> None:
        # Before anything slow: a signal during start-up ends the process quietly, with nothing begun.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave_now)
        self.warn_of_unknown_settings()
        try:
            fields = {k: v for k, v in options.items() if k in ServerConfig.__struct_fields__}
            config = ServerConfig.from_env(**fields)
            core = Config.from_env()
        except ConfigError as exc:
            raise CommandError(str(exc)) from None
        if not core.redis_url:
            raise CommandError(
                "REDIS_URL is not set. Give it (for instance redis://localhost:6379/0), "
                "or let 'make serve' bring its own Redis."
            )
        self.warn(*config.warnings())
        conf.use(config)
        if options["fd"] is not None:
            sys.exit(self._serve_inherited(config, options["fd"], options["ready_fd"]))
        self._check_database()
        self._raise_file_limit(config)
        sys.exit(self._serve(config))

    def _raise_file_limit(self, config: ServerConfig) -> None:
        """Each connection is a file; the usual soft limit of 1,024 is less than we allow."""
        wanted = config.max_connections + SPARE_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            self.warn(
                f"{allowed} open files are allowed, but SLUICE_MAX_CONNECTIONS {config.max_connections} "
                f"needs {wanted}. Raise the limit (ulimit -n), or lower the setting."
            )

    def _check_database(self) -> None:
        from django.db import connection
        from django.db.migrations.executor import MigrationExecutor

        try:
            executor = MigrationExecutor(connection)
            missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
        except Exception as exc:  # noqa: BLE001 - drivers raise what they like; all of it means: no database
            raise CommandError(f"The database does not answer (DATABASE_URL): {exc}") from None
        finally:
            connection.close()
        if missing:
            raise CommandError(f"{len(missing)} migrations are missing. Run: manage.py migrate")

    def _serve_inherited(self, config: ServerConfig, fd: int, ready_fd: int) -> int:
        """One of several processes: the supervisor has made the checks and bound the socket."""
        from sluice.server.process import serve

        def ready() -> None:
            os.write(ready_fd, b"1")
            os.close(ready_fd)

        return serve(config, [socket.socket(fileno=fd)], on_ready=ready)

    def _serve(self, config: ServerConfig) -> int:
        from sluice.server import sockets

        try:
            listener = sockets.listen(config.host, config.port)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                raise CommandError(
                    f"Port {config.port} on {config.host} is taken. Stop what uses it, or choose another with --port."
                ) from None
            raise CommandError(f"Cannot listen on {config.host}:{config.port}: {exc.strerror or exc}") from None
        host, port = listener.getsockname()[:2]

        def ready() -> None:
            shown = f"[{host}]" if ":" in host else host
            self.stdout.write(f"Listening on http://{shown}:{port}/ (pid {os.getpid()}). Ctrl-C stops it.")
            self.stdout.flush()

        if config.processes > 1:
            from sluice.server.multi import Supervisor

            return Supervisor(config, listener, ready).run()
        from sluice.server.process import serve

        return serve(config, [listener], on_ready=ready)


def _leave_now(number: int, frame: Any) -> None:
    raise SystemExit(0)
