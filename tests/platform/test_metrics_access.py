"""Who may read ``/metrics`` without an account, by each value of ``SLUICE_METRICS_ACCESS``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from apps.accounts import auth
from sluice import access, conf
from sluice.conf import ServerConfig
from sluice.consumers.errors import HttpError
from tests.faults.harness import Exchange, Rig

HERE = "127.0.0.1"


def caller(address: str | None, **headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "client": address and (address, 4711), "headers": named}


async def may_scrape(monkeypatch: pytest.MonkeyPatch, scope: dict[str, Any], **settings: Any) -> bool:
    async def nobody(scope: Any) -> None:
        return None

    monkeypatch.setattr(conf, "_current", ServerConfig(**settings))
    monkeypatch.setattr(auth, "authenticate", nobody)
    try:
        await access.check("metrics", scope)
    except HttpError as exc:
        assert exc.status == 401
        return False
    return True


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        (caller(HERE), True),
        (caller("::1"), True),
        (caller("10.0.0.9"), False),
        (caller("127.0.0.1.example"), False),
        (caller("::ffff:10.0.0.9"), False),
        (caller(None), False),
        (caller(HERE, x_forwarded_for="10.0.0.9"), False),
        (caller(HERE, x_forwarded_for="127.0.0.1"), False),
        (caller(HERE, forwarded="for=10.0.0.9"), False),
        (caller(HERE, x_real_ip="10.0.0.9"), False),
        (caller(HERE, via="1.1 proxy"), False),
        (caller("10.0.0.9", x_forwarded_for="127.0.0.1"), False),
    ],
)
async def test_loopback_is_this_machine_and_no_proxy(
    monkeypatch: pytest.MonkeyPatch, scope: dict[str, Any], allowed: bool
) -> None:
    """A proxy on this machine has callers from anywhere, so what came through one does not count as local."""
    assert await may_scrape(monkeypatch, scope, metrics_access="loopback") is allowed


async def test_staff_and_public(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await may_scrape(monkeypatch, caller(HERE))
    assert await may_scrape(monkeypatch, caller("10.0.0.9"), metrics_access="public")


@pytest.mark.parametrize("access", ["staff", "loopback"])
async def test_the_token_is_good_from_anywhere(monkeypatch: pytest.MonkeyPatch, access: str) -> None:
    settings = {"metrics_access": access, "metrics_token": "a-token"}
    assert await may_scrape(monkeypatch, caller("10.0.0.9", authorization="Bearer a-token"), **settings)
    for wrong in ("Bearer a-toke", "Bearer a-token2", "Bearer ", "Basic a-token", "a-token", "Bearer b-token"):
        assert not await may_scrape(monkeypatch, caller("10.0.0.9", authorization=wrong), **settings)


async def test_loopback_on_a_real_server(tmp_path: Path) -> None:
    """Over real sockets, with the server's own idea of who is calling."""
    async with Rig(tmp_path, SLUICE_METRICS_ACCESS="loopback", SLUICE_METRICS_TOKEN="") as rig:
        _, server = await asyncio.gather(rig.pool(), rig.server())
        seen = []
        for headers in ({}, {"X-Forwarded-For": "10.0.0.9"}):
            exchange = await Exchange.open(server.port, "GET", "/metrics", headers=headers)
            text = await exchange.body()
            seen.append((exchange.status, b"sluice_requests_inflight" in text))
            await exchange.close()
        assert seen == [(200, True), (401, False)]
