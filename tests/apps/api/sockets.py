"""The streaming socket as tests use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.apps.api.live import Site


@asynccontextmanager
async def opened(site: Site, **options: Any) -> AsyncIterator[ClientConnection]:
    """A socket of ``/ws/v1/stream``, with the site's key unless other headers are given."""
    headers = options.pop("additional_headers", {"Authorization": f"Bearer {site.key}"})
    options.setdefault("subprotocols", ["sluice.v1"])
    async with connect(f"ws://{site.host}/ws/v1/stream", additional_headers=headers, **options) as socket:
        yield socket


async def tell(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def hear(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(15):
        return json.loads(await socket.recv())


async def until(socket: ClientConnection, kind: str, ref: str | None = None) -> list[dict[str, Any]]:
    """All messages up to one of that type (and reference), which is the last."""
    seen = []
    while True:
        seen.append(await hear(socket))
        if seen[-1]["type"] == kind and ref in (None, seen[-1]["id"]):
            return seen
