"""One server process: application, gateway, server and drain, wired together."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from django.utils.module_loading import import_string

from sluice import runtime
from sluice.conf import ServerConfig
from sluice.server.drain import Drain, DrainHooks
from sluice.server.server import SluiceServer
from sluice.status import ServerState


class GatewayHooks(DrainHooks):
    """The drain's view of the process's gateway; the gateway may not have started."""

    def state_changed(self, state: ServerState) -> None:
        if runtime.started():
            runtime.gateway().set_state(str(state))

    def open_ids(self) -> list[str]:
        return runtime.gateway().open_ids() if runtime.started() else []

    async def describe(self) -> str:
        if not runtime.started():
            return ""
        gateway = runtime.gateway()
        phases = Counter(stream.phase for stream in gateway.streams())
        requests = ", ".join(f"{phase}={n}" for phase, n in sorted(phases.items())) or "none"
        workers = ", ".join(f"{w.id} {w.state}" for w in await gateway.workers()) or "none"
        return f"requests: {requests}; workers: {workers}"

    async def end_streams(self) -> None:
        if runtime.started():
            await runtime.gateway().end_streams()

    async def stop(self, timeout: float) -> None:
        await runtime.stop(timeout)


def load_application() -> Any:
    """The ASGI application; ``SLUICE_ASGI_APPLICATION`` names another one (tests, add-ons)."""
    return import_string(os.environ.get("SLUICE_ASGI_APPLICATION") or "sluice.asgi.application")


def serve(config: ServerConfig, listeners: list[socket.socket], *, on_ready: Callable[[], None]) -> int:
    """Serve until drained; returns the exit code."""
    drain = Drain(config, runtime.status, runtime.exchanges, GatewayHooks(), owns_process=True)
    runtime.on_command = drain.on_command
    server = SluiceServer(
        load_application(),
        config,
        listeners=listeners,
        status=runtime.status,
        exchanges=runtime.exchanges,
        drain=drain,
        on_start=runtime.start,
        on_ready=on_ready,
    )
    runtime.server = server
    return server.run()
