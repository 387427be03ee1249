"""``manage.py up``: everything on one machine, in one process tree (what ``make serve`` calls)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import msgspec
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, connections
from redis.exceptions import RedisError

from apps.accounts.services import FirstRun, ensure_first_run
from inference import multiproc
from inference.config import Config
from inference.errors import ConfigError, SluiceError
from inference.models.registry import DEFAULT_TARGET, check_folder, check_models, default_folder
from inference.pool import check_present, check_sharing, parse_devices
from inference.redisio.connect import connect
from sluice.command import Command as SluiceCommand
from sluice.conf import ServerConfig
from sluice.tree import PATIENCE, POLL, Child, ChildEnded, ProcessTree, Signals, StopRequested

MIN_REDIS = (6, 2)
#: Seconds after a Ctrl-C at which each part is killed if it still runs. All is gone within 10.
HURRIED_SERVER, HURRIED_POOL = 4.5, 7.5
#: Seconds between lines about what is still missing, and between looks at the children although none has ended.
SAY_EVERY = 10.0
WATCH = 5.0


class Command(SluiceCommand):
    help = (
        "Run everything on this machine: migrate the database, fetch the default model if it is wanted and "
        "missing, start an embedded Valkey (unless REDIS_URL is set), the worker pool and the server, and say "
        "how to sign in. Ctrl-C stops all of it within 10 seconds, a second one without waiting for what runs; SIGTERM "
        "lets running streams finish first."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", help="address to listen on (SLUICE_HOST, 127.0.0.1)")
        parser.add_argument("--port", type=int, help="port to listen on (SLUICE_PORT, 8000)")

    def handle(self, *args: Any, host: str | None, port: int | None, **options: Any) -> None:
        started = time.monotonic()
        signals = Signals()
        signals.install()
        self.warn_of_unknown_settings()
        try:
            core, web = Config.from_env(), ServerConfig.from_env(host=host, port=port)
        except ConfigError as exc:
            raise CommandError(str(exc)) from exc
        tree = ProcessTree(
            signals,
            server=Child("server", grace=web.longest_stop + 5, hurried=HURRIED_SERVER),
            pool=Child("worker pool", grace=core.drain_timeout + 5, hurried=HURRIED_POOL),
        )
        problem: str | None = None
        folder = contextlib.ExitStack()
        # Server and pool count into files of their own here; /metrics adds them up.
        os.environ[multiproc.VARIABLE] = folder.enter_context(multiproc.folder())
        try:
            self._start(tree, core, web, started)
            while True:
                tree.check()
                signals.wait(WATCH)
        except StopRequested:
            soon = f"Stopping; what still runs has {PATIENCE:g} s (Ctrl-C again ends it now) ..."
            self._say(soon if signals.hurry else "Draining (Ctrl-C to hurry) ...")
        except (SluiceError, ChildEnded) as exc:
            problem = str(exc)
            signals.hurry_up()  # nobody can be served any more
        finally:
            killed = tree.stop()
            folder.close()
        if killed:
            problem = f"{problem}; " if problem else ""
            problem += f"the {' and the '.join(killed)} did not stop in time and had to be killed"
        if problem:
            raise CommandError(problem)
        self._say("Stopped; nothing is left running.")

    def _start(self, tree: ProcessTree, core: Config, web: ServerConfig, started: float) -> None:
        """From nothing to ready. Cheap checks come first, so that what is wrong shows at once."""
        if web.port == 0:
            # Chosen here, because this process must know where to ask whether the server is ready.
            web = msgspec.structs.replace(web, port=free_port(web.host))
        check_port(web.host, web.port)
        if core.devices.strip() != "auto":
            devices = parse_devices(core.devices)
            check_sharing(devices, core.model_specs())
            check_present(devices, core.model_specs())
        if core.redis_url:
            self._say("Redis: asking the one in REDIS_URL ...")
            asyncio.run(check_redis(core))
        self._say("Database: migrating ...")
        migrate()
        tree.check()
        self._fetch_model(tree, core)
        check_models(core.model_specs(), core)
        if not core.redis_url:
            self._say("Valkey: starting an embedded one ...")
            core_url = tree.start_valkey()
        else:
            core_url = core.redis_url
        env = {"REDIS_URL": core_url, "SLUICE_HOST": web.host, "SLUICE_PORT": str(web.port)}
        self._say("Workers and server: starting ...")
        tree.pool.start("runworker", env=env)
        tree.server.start("serve", env=env)
        self._wait_ready(tree, web, core.start_timeout)
        self._welcome(web, time.monotonic() - started, "" if core.redis_url else core_url)

    def _fetch_model(self, tree: ProcessTree, core: Config) -> None:
        wanted = [s for s in core.model_specs() if s.engine == "transformers" and s.target == DEFAULT_TARGET]
        if not wanted:
            return
        self._say("Model: checking ...")
        if check_folder(default_folder(core)) is None:
            return
        # In a process of its own: converting takes a gigabyte that this one need not keep.
        fetch = Child("model fetch", grace=10.0, hurried=5.0)
        fetch.start("fetchmodel", env={})
        try:
            while fetch.running():
                tree.check()
                tree.signals.wait(POLL)
        finally:
            fetch.stop(tree.signals)
        assert fetch.process is not None
        if fetch.process.returncode:
            raise ConfigError("the default model could not be fetched (the reason stands above)")

    def _wait_ready(self, tree: ProcessTree, web: ServerConfig, limit: float) -> None:
        """Poll ``/readyz``, and say what is missing whenever that changes.

        Raises:
            ConfigError: not ready within ``limit`` seconds.
        """
        url = f"http://{local_address(web)}/readyz"
        began = said_at = time.monotonic()
        said = ""
        while True:
            tree.check()
            missing = missing_for_readiness(url)
            if missing is None:
                return
            now = time.monotonic()
            if missing != said or now - said_at > SAY_EVERY:
                self._say(f"  {now - began:4.0f} s  {missing}")
                said, said_at = missing, now
            if now - began > limit:
                raise ConfigError(f"not ready within {limit:g} s (SLUICE_START_TIMEOUT): {missing}")
            tree.signals.wait(POLL)

    def _welcome(self, web: ServerConfig, seconds: float, own_redis: str) -> None:
        first = first_user()
        self._say("")
        self._say(f"Sluice is ready after {seconds:.0f} s:  http://{local_address(web)}/")
        if first is not None:
            self._say(f"  sign in as   {first.username}")
            self._say(f"  password     {first.password}")
            self._say(f"  API key      {first.key}")
            self._say("  Password and key are not shown again.")
        else:
            self._say("  Sign in as before; 'manage.py changepassword NAME' sets a new password,")
            self._say("  'manage.py apikey create LABEL' makes another API key.")
        if own_redis:
            self._say(f"Other commands, as 'manage.py inflight', find it with REDIS_URL={own_redis}")
        self._say("Ctrl-C stops everything.")

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def free_port(host: str) -> int:
    """A TCP port of ``host`` that nothing listens on just now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """See that the server will be able to listen.

    Raises:
        ConfigError: the port is taken, or the address is none of this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken; stop what listens there, or choose another with --port or SLUICE_PORT"
            ) from exc
        raise ConfigError(f"cannot listen on {host} port {port}: {exc.strerror}; set --host and --port") from exc


async def check_redis(core: Config) -> None:
    """See that the Redis of ``REDIS_URL`` answers and is new enough.

    Raises:
        ConfigError: it does not, or is not.
    """
    client = connect(core.redis_url, timeout=core.redis_timeout, client_name="sluice-up")
    try:
        info: dict[str, Any] = await client.info("server")
    except (RedisError, OSError, ValueError) as exc:
        raise ConfigError(f"the Redis in REDIS_URL does not answer ({type(exc).__name__}: {exc})") from exc
    finally:
        await client.aclose()
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS:
        raise ConfigError(f"the Redis in REDIS_URL is version {version}; Sluice needs 6.2 or newer, or Valkey")


def migrate() -> None:
    """Bring the database to the current schema.

    Raises:
        ConfigError: it does not answer, or cannot be changed.
    """
    try:
        call_command("migrate", interactive=False, verbosity=0)
    except DatabaseError as exc:
        reason = str(exc).strip().splitlines()
        raise ConfigError(
            f"the database does not answer ({reason[0] if reason else type(exc).__name__}); "
            "check DATABASE_URL, or unset it to use SQLite"
        ) from exc


def first_user() -> FirstRun | None:
    """Make the first administrator; SLUICE_ADMIN_USER and SLUICE_ADMIN_PASSWORD choose name and password."""
    password = os.environ.get("SLUICE_ADMIN_PASSWORD", "")
    try:
        first = ensure_first_run(username=os.environ.get("SLUICE_ADMIN_USER") or "admin")
        if first is not None and password:
            user = get_user_model()._default_manager.get_by_natural_key(first.username)
            user.set_password(password)
            user.save(update_fields=["password"])
            first = first._replace(password="(as in SLUICE_ADMIN_PASSWORD)")
        return first
    finally:
        connections.close_all()


def local_address(web: ServerConfig) -> str:
    """``host:port`` under which this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(web.host, web.host)
    return f"[{host}]:{web.port}" if ":" in host else f"{host}:{web.port}"


def missing_for_readiness(url: str) -> str | None:
    """What the server still waits for, in words; ``None`` when it is ready."""
    try:
        with urllib.request.urlopen(url, timeout=2.0):
            return None
    except urllib.error.HTTPError as exc:
        with exc:
            try:
                reasons = json.load(exc).get("reasons")
            except (ValueError, AttributeError, OSError):
                reasons = None
        why = "; ".join(map(str, reasons)) if reasons else f"it answers {exc.code}"
        return f"the server listens, but is not ready: {why}"
    except OSError:
        return "the server is loading"
