"""Fixtures for every test: a real Valkey, ports, settings, and the checks that nothing is left.

Environment defaults are set before Django reads its settings, which is why the
settings module is named here and not in ``pyproject.toml``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sluice.settings")
os.environ.setdefault("SLUICE_DEBUG", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # it would ask for prices in a thread, and log at the end
os.environ.pop("REDIS_URL", None)

import django  # noqa: E402
import redis as redis_sync  # noqa: E402
import redis.asyncio as redis_async  # noqa: E402

from inference.config import Config  # noqa: E402
from inference.embedded import EmbeddedValkey  # noqa: E402
from inference.errors import ModelUnavailable  # noqa: E402
from inference.models.registry import resolve_default  # noqa: E402
from tests.support import find_free_port  # noqa: E402

django.setup()  # pytest-django looked for the variable before it was set here

CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot do; under CI only a GPU may be missing."""
    gpu = None
    for item in items:
        if item.get_closest_marker("gpu"):
            if gpu is None:
                import torch

                gpu = torch.cuda.is_available()
            if not gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def skip_or_fail(reason: str) -> None:
    """Skip on somebody's laptop; fail under CI, where the means must be there."""
    if CI:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def valkey() -> Iterator[EmbeddedValkey]:
    """One real Valkey for the whole run. Most tests want ``redis_url``, which empties it first."""
    with EmbeddedValkey() as server:
        yield server


def _empty(server: EmbeddedValkey) -> None:
    with redis_sync.Redis.from_url(server.url) as client:
        client.flushall()
        client.config_resetstat()


@pytest.fixture(scope="module")
def empty_valkey(valkey: EmbeddedValkey) -> EmbeddedValkey:
    """The run's Valkey without what the module before has left, such as the heartbeat of a worker of its own."""
    _empty(valkey)
    return valkey


@pytest.fixture
def redis_url(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty Valkey, also set as ``REDIS_URL``."""
    _empty(valkey)
    monkeypatch.setenv("REDIS_URL", valkey.url)
    return valkey.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[redis_async.Redis]:
    """An asyncio client of the empty Valkey (bytes in, bytes out)."""
    client = redis_async.Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def fresh_valkey() -> Iterator[Callable[[], EmbeddedValkey]]:
    """A factory of servers that a test may kill, stop and restart."""
    servers: list[EmbeddedValkey] = []

    def make() -> EmbeddedValkey:
        server = EmbeddedValkey()
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def make_config(redis_url: str) -> Callable[..., Config]:
    """Settings with a scripted model and short times; arguments override."""

    def make(**overrides: Any) -> Config:
        values: dict[str, Any] = {
            "redis_url": redis_url,
            "models": "scripted=scripted:rate=200",
            "heartbeat_interval": 0.1,
            "heartbeat_ttl": 0.5,
            "reap_interval": 0.1,
            "check_interval": 0.1,
            "ping_interval": 0.5,
        }
        return Config(**{**values, **overrides})

    return make


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config()


@pytest.fixture(scope="session")
def model_folder() -> str:
    """The fetched default model; for tests marked ``model``."""
    try:
        return resolve_default()
    except ModelUnavailable as exc:
        skip_or_fail(str(exc))
        raise


@pytest.fixture
def free_port() -> int:
    return find_free_port()
