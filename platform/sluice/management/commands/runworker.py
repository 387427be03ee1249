"""``manage.py runworker``: a pool of worker processes, one engine and one device each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError

from inference import multiproc
from inference.config import Config
from inference.logs import configure
from inference.models.registry import check_models
from inference.pool import Supervisor, check_present, check_sharing, parse_devices
from sluice.command import Command as SluiceCommand


class Command(SluiceCommand):
    """Takes the place of the Channels command of the same name."""

    help = (
        "Run a pool of workers until SIGTERM or Ctrl-C. Each worker is a process of its own with one engine on "
        "one device; a worker that dies is replaced and its requests continue. Pools on several hosts share the "
        "queue. SIGTERM finishes what runs (or hands it to other workers at the drain deadline)."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--devices", help="auto (default), cpu, cuda:0,cuda:1 (a worker on each) or cuda:0+cuda:1 (one on both)"
        )
        parser.add_argument("--workers-per-device", type=int, metavar="N", help="processes per device (default 1)")
        parser.add_argument(
            "--metrics-port",
            type=int,
            metavar="PORT",
            help="serve the pool's own counters here; for pools on hosts without a server (default: no)",
        )
        parser.add_argument(
            "--metrics-host", metavar="ADDRESS", help="address for that port (default 127.0.0.1; it asks for no key)"
        )
        parser.add_argument("--models", metavar="ALIAS,...", help="serve only these of SLUICE_MODELS")

    def handle(self, *args: Any, **options: Any) -> None:
        self.warn_of_unknown_settings()
        config, models = self._config(options)
        devices = parse_devices(config.devices)
        specs = [s for s in config.model_specs() if s.alias in models]
        check_sharing(devices, specs)
        check_present(devices, specs)
        configure("pool")
        with exported(config):
            status = asyncio.run(_run(config, devices, models))
        if status:
            raise SystemExit(status)

    @staticmethod
    def _config(options: dict[str, Any]) -> tuple[Config, list[str]]:
        given = {
            k: options[k]
            for k in ("devices", "workers_per_device", "metrics_port", "metrics_host")
            if options.get(k) is not None
        }
        config = Config.from_env(**given)
        if not config.redis_url:
            raise CommandError("REDIS_URL is not set; a pool needs the Redis that its servers use")
        known = [s.alias for s in config.model_specs()]
        models = [m for m in (options.get("models") or "").split(",") if m] or known
        for alias in models:
            if alias not in known:
                raise CommandError(f"--models: {alias!r} is not in SLUICE_MODELS ({', '.join(known)})")
        check_models((s for s in config.model_specs() if s.alias in models), config)
        # Workers read their settings from the environment, as this process did.
        os.environ["SLUICE_DEVICES"] = config.devices
        return config, models


@contextlib.contextmanager
def exported(config: Config) -> Iterator[None]:
    """Serve what the pool's processes count, where a port is set.

    Raises:
        CommandError: nothing can listen there.
    """
    if not config.metrics_port:
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server

    with multiproc.folder() as folder:
        os.environ[multiproc.VARIABLE] = folder  # the workers inherit it
        registry = CollectorRegistry()
        registry.register(multiproc.Merged(folder))
        try:
            server, thread = start_http_server(config.metrics_port, config.metrics_host, registry)
        except OSError as exc:
            raise CommandError(
                f"Cannot serve metrics on {config.metrics_host}:{config.metrics_port}: {exc.strerror or exc}"
            ) from exc
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join(2.0)


async def _run(config: Config, devices: list[str], models: list[str]) -> int:
    supervisor = Supervisor(config, devices, models=models)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.drain)
    return await supervisor.run()
