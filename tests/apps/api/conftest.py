"""One live site for all tests of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference.embedded import EmbeddedValkey
from tests.apps.api import live


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Site]:
    with EmbeddedValkey() as valkey:
        running = live.start(tmp_path_factory.mktemp("site"), valkey)
        try:
            yield running
        finally:
            live.stop(running)
