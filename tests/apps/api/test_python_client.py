"""The reference client: what it streams, and that a lost connection is not noticed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest

from tests.apps.api.live import Site
from tests.conftest import ROOT

sys.path.append(str(ROOT / "clients/python/src"))

from sluice_client import AsyncClient, Client, ConnectionLost, GenerationError

pytestmark = pytest.mark.timeout(180)


class Proxy:
    """Passes bytes on to the site, until it cuts every connection."""

    def __init__(self, site: Site) -> None:
        self.target = site.host.split(":")
        self.writers: list[asyncio.StreamWriter] = []
        self.connections = 0

    async def __aenter__(self) -> Proxy:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self.target[0], int(self.target[1]))
        self.writers += [writer, far_writer]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def proxy(site: Site) -> AsyncIterator[Proxy]:
    async with Proxy(site) as proxy:
        yield proxy


async def test_several_generations_and_a_cancel(site: Site) -> None:
    async with AsyncClient(site.url, site.key) as client:
        first = await client.generate(prompt="a", model="demo", max_tokens=12, seed=1)
        second = await client.generate(
            messages=[{"role": "user", "content": "b"}], model="slow", max_tokens=500, ignore_eos=True
        )
        result = await first.wait()
        assert result.usage["completion_tokens"] == 12
        assert result.finish_reason == "length"
        await anext(second)
        await second.cancel()
        assert (await second.wait()).finish_reason == "cancelled"
        refused = await client.generate(prompt="a", model="nope")
        with pytest.raises(GenerationError) as caught:
            await refused.wait()
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


async def test_a_lost_connection_loses_and_repeats_nothing(site: Site, proxy: Proxy) -> None:
    async with AsyncClient(site.url, site.key) as direct:
        whole = await (
            await direct.generate(prompt="same", model="slow", max_tokens=40, ignore_eos=True, temperature=0)
        ).wait()
    async with AsyncClient(proxy.url, site.key) as client:
        answer = await client.generate(prompt="same", model="slow", max_tokens=40, ignore_eos=True, temperature=0)
        pieces = []
        async for piece in answer:
            pieces.append(piece)
            if len(pieces) in (5, 15):
                proxy.cut()
    assert proxy.connections == 3
    assert "".join(pieces) == whole.text
    assert answer.result is not None
    assert answer.result.usage["completion_tokens"] == 40


async def test_strangers_are_told_at_once(site: Site) -> None:
    with pytest.raises(ConnectionLost, match=r"\(401\): This API key .* is unknown, expired or revoked"):
        async with AsyncClient(site.url, "wrong"):
            pass


async def test_a_server_that_stays_away_ends_the_wait(site: Site, proxy: Proxy) -> None:
    async with AsyncClient(proxy.url, site.key, patience=0.5) as client:
        answer = await client.generate(prompt="x", model="slow", max_tokens=400, ignore_eos=True)
        await anext(answer)
        proxy.server.close()
        proxy.cut()
        with pytest.raises(ConnectionLost):
            await answer.wait()


def test_without_async(site: Site) -> None:
    with Client(site.url, site.key) as client:
        answer = client.generate(prompt="a", model="demo", max_tokens=12)
        assert answer.result is None
        text = "".join(answer)
        assert answer.result is not None
        assert answer.result.text == text
        assert client.generate(prompt="a", model="demo", max_tokens=3).wait().usage["completion_tokens"] == 3
        with pytest.raises(GenerationError):
            client.generate(prompt="a", model="demo", max_tokens=0).wait()


async def test_what_is_no_json_is_refused_before_it_is_sent(site: Site) -> None:
    async with AsyncClient(site.url, site.key) as client:
        for wrong in ({"temperature": float("nan")}, {"stop": "\ud800"}):
            with pytest.raises(ValueError):
                await client.generate(prompt="x", model="demo", **wrong)
        assert (await (await client.generate(prompt="x", model="demo", max_tokens=3)).wait()).finish_reason == "length"


async def test_a_message_that_is_too_big_fails_and_the_others_go_on(proxy: Proxy, site: Site) -> None:
    async with AsyncClient(proxy.url, site.key) as client, asyncio.timeout(30):
        other = await client.generate(prompt="x", model="slow", max_tokens=30, ignore_eos=True)
        async for _ in other:
            break
        big = await client.generate(prompt="x" * 1_100_000, model="demo")
        with pytest.raises(GenerationError) as caught:
            await big.wait()
        assert (caught.value.status, caught.value.code) == (413, "message_too_big")
        assert (await other.wait()).finish_reason == "length"
    assert proxy.connections == 2
