"""The server's settings: typed, validated, and checked against each other."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.config import Config
from inference.environ import env_name
from inference.errors import ConfigError
from sluice.conf import ServerConfig
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PRE_DRAIN", "-1", "between 0 and 1800"),
        ("PRE_DRAIN", "5000", "milliseconds"),
        ("DRAIN_DEADLINE", "abc", "must be a number"),
        ("DRAIN_DEADLINE", "nan", "must be a number"),
        ("DRAIN_DEADLINE", "inf", "must be a number"),
        ("TERMINATION_GRACE", "-0.1", "between 0 and 1800"),
        ("TERMINATION_GRACE", "x", "must be a number"),
        ("PORT", "80.5", "whole number"),
        ("PORT", "65536", "65535"),
        ("PROCESSES", "0", "greater than 0"),
        ("MAX_BODY_BYTES", "-1", "greater than 0"),
        ("SEND_TIMEOUT", "nan", "must be a number"),
        ("DEBUG", "maybe", "true or false"),
        ("LOG_LEVEL", "LOUD", "DEBUG"),
    ],
)
def test_bad_values_name_the_setting(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig.from_env({f"SLUICE_{name}": value})
    assert f"SLUICE_{name}" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("REQUEST_TIMEOUT", "inf", "must be a number"),
        ("QUEUE_TIMEOUT", "0", "greater than 0"),
        ("HISTORY_SIZE", "0", "greater than 0"),
        ("LOG_RETENTION", "-1", "not be negative"),
        ("DRAIN_TIMEOUT", "-1", "between 0 and 1800"),
        ("DRAIN_TIMEOUT", "30000", "milliseconds"),
        ("MAX_RUNNING", "1.5", "whole number"),
        ("DTYPE", "int4", "auto, float32"),
    ],
)
def test_bad_values_of_the_core_name_the_setting(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_env({f"SLUICE_{name}": value})
    assert f"SLUICE_{name}" in str(error.value)
    assert words in str(error.value)


def test_environment_flags_and_defaults() -> None:
    config = ServerConfig.from_env({"SLUICE_PRE_DRAIN": "1.5", "SLUICE_PORT": " 9000 "}, port=9001, host=None)
    assert (config.pre_drain, config.port, config.host) == (1.5, 9001, "127.0.0.1")
    assert (ServerConfig().pre_drain, ServerConfig().drain_deadline, ServerConfig().termination_grace) == (5, 30, None)


@pytest.mark.parametrize("name", ["pre_drain", "drain_deadline", "termination_grace", "send_timeout"])
def test_flags_are_numbers_too(name: str) -> None:
    """argparse takes "nan" and "inf" for numbers; a client that never reads was then never cut off."""
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError, match=f"SLUICE_{name.upper()} must be a number"):
            ServerConfig.from_env({}, **{name: value})
    with pytest.raises(ConfigError, match=f"SLUICE_{name.upper()}"):
        ServerConfig.from_env({}, **{name: -1.0})


def test_settings_survive_the_way_to_a_child_process() -> None:
    config = ServerConfig(pre_drain=0.25, debug=True, termination_grace=60, allowed_hosts="a,b")
    assert ServerConfig.from_env(config.to_env()) == config


def test_warning_when_the_times_cannot_add_up() -> None:
    assert ServerConfig(pre_drain=5, drain_deadline=30).warnings() == []
    assert ServerConfig(pre_drain=5, drain_deadline=30, termination_grace=40).warnings() == []
    (warning,) = ServerConfig(pre_drain=5, drain_deadline=30, termination_grace=39.5).warnings()
    assert "SLUICE_TERMINATION_GRACE" in warning
    assert "at least 40 s" in warning


def test_env_names() -> None:
    assert env_name("pre_drain") == "SLUICE_PRE_DRAIN"


def settings(tmp_path: Path, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    values = {**os.environ, "SLUICE_DEBUG": "", "SLUICE_VAR_DIR": str(tmp_path), **env}
    values["PYTHONPATH"] = f"{ROOT}:{ROOT / 'platform'}"
    values.pop("SECRET_KEY", None) if "SECRET_KEY" not in env else None
    code = f"from sluice import settings; {code or 'print(settings.SECRET_KEY)'}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=values, capture_output=True, text=True)


def test_development_key_is_random_private_and_stays(tmp_path: Path) -> None:
    first, second = settings(tmp_path), settings(tmp_path)
    assert first.stdout == second.stdout
    assert len(first.stdout.strip()) >= 50
    assert (tmp_path / "secret_key").stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    assert settings(other).stdout != first.stdout
    assert other.stat().st_mode & 0o777 == 0o700  # the database in it holds chats


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLUICE_PRODUCTION": "1"}, "SECRET_KEY is not set"),
        ({"SLUICE_VAR_DIR": "/proc/none"}, "SLUICE_VAR_DIR: /proc/none cannot be made"),
        ({"SLUICE_PRODUCTION": "1", "SECRET_KEY": "short"}, "too weak"),
        ({"SLUICE_PRODUCTION": "1", "SECRET_KEY": "a" * 60}, "too weak"),
        ({"SLUICE_PRODUCTION": "1", "SLUICE_DEBUG": "1"}, "SLUICE_DEBUG"),
        ({"SLUICE_PRE_DRAIN": "9999999"}, "SLUICE_PRE_DRAIN"),
        ({"DATABASE_URL": "nonsense"}, "DATABASE_URL"),
    ],
)
def test_refuses_to_start(tmp_path: Path, env: dict[str, str], words: str) -> None:
    result = settings(tmp_path, **env)
    assert result.returncode != 0
    assert words in result.stderr.strip().splitlines()[-1]


def test_debug_is_off_and_sqlite_waits_by_default(tmp_path: Path) -> None:
    result = settings(tmp_path, "print(settings.DEBUG, settings.DATABASES['default']['OPTIONS']['init_command'][:23])")
    assert result.stdout.strip() == "False PRAGMA journal_mode=WAL"


def test_settings_that_are_printed_show_no_secret() -> None:
    """Django shows the settings, and the variables of each frame, on its page of errors."""
    values = {"REDIS_URL": "redis://:hunter2@host", "SLUICE_METRICS_TOKEN": "hunter2", "SLUICE_HOST": "::1"}
    for config in (Config.from_env(values), ServerConfig.from_env(values)):
        assert "***" in repr(config)
        assert "hunter2" not in f"{config!r} {config}"
    assert "host='::1'" in repr(ServerConfig.from_env(values))
    assert "metrics_token=''" in repr(ServerConfig())
