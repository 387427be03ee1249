"""What tests of the chat's sockets share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from inference.config import Config
from sluice import runtime


@pytest.fixture
async def configured(
    transactional_db: Any, monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Config]
) -> AsyncIterator[None]:
    """A process that serves sockets, with a database and Redis that it may reach."""
    monkeypatch.setattr(runtime, "_config", make_config())
    yield
    await runtime.stop(5.0)  # sockets start the gateway where nobody has
