"""What tests of usage share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from inference.config import Config
from inference.redisio import Commander, connect
from inference.store.store import RequestStore


@pytest.fixture
async def store(config: Config) -> AsyncIterator[RequestStore]:
    """The request store on a connection of its own."""
    redis = Commander(lambda: connect(config.redis_url, timeout=2, client_name="test"), name="test")
    redis.start()
    yield RequestStore(redis, config)
    await redis.stop()
