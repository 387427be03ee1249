"""What is said of a malformed ``REDIS_URL``: the mend, and nothing of the password that is mostly the reason."""

from __future__ import annotations

import traceback

import pytest

from inference.config import Config
from inference.errors import ConfigError
from inference.redisio import connect


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/x@host:6379/0",
        "redis://user:hunter2#x@host",
        "rediss://:hunter2?x@host",
        "redis://user:hunter2[x@host:6379",
        "redis+sentinel://:hunter2/x@host:26379/mymaster",
        "redis+sentinel://host:26379/mymaster/hunter2",
        "redis+sentinel://:x[hunter2@host:26379/mymaster",
        "hunter2://host",
        "redis",
    ],
)
def test_no_part_of_a_malformed_address_is_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="REDIS_URL") as refused:
        connect(Config(redis_url=url).redis_url, timeout=1, client_name="test")
    # As a log would have it: with the reasons behind the reason.
    assert "hunter2" not in "".join(traceback.format_exception(refused.value)).replace(repr(url), "")


@pytest.mark.parametrize(
    "url", ["redis://user:p%2Fw%40d@host:6379/0", "REDIS://host", "unix:///run/valkey.sock", "rediss://host?db=1"]
)
def test_well_formed_addresses_are_taken(url: str) -> None:
    connect(Config(redis_url=url).redis_url, timeout=1, client_name="test")
