"""What goes wrong in a command of ours is one line that begins with ``error:``, whichever command it is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command, get_commands, load_command_class

from inference.logs import LineFormatter
from sluice.command import Command
from tests.conftest import ROOT

NOBODY = "redis://127.0.0.1:1/0"


def run(*arguments: str, **env: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "SLUICE_MODELS": "m=scripted:rate=50", **env}
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["inflight"], ["drain", "--all"], ["runworker"]])
def test_redis_that_was_never_there_is_told_once(arguments: list[str]) -> None:
    status, out, err = run(*arguments, REDIS_URL=NOBODY)
    assert (status, out) == (1, "")
    assert err.splitlines() == ["error: Redis does not answer (ConnectionError); start it, or correct REDIS_URL"]


def test_other_mistakes_read_the_same() -> None:
    assert run("inflight", REDIS_URL="")[2].startswith("error: REDIS_URL is not set; give it")
    assert run("inflight", REDIS_URL=NOBODY, SLUICE_REDIS_TIMEOUT="soon")[2].startswith("error: SLUICE_REDIS_TIMEOUT")
    both = run("drain", "--all", "s-1", "s-2", REDIS_URL=NOBODY)  # the names used to be ignored
    assert both == (1, "", "error: --all is every server; leave it out to mean s-1 s-2\n")
    undo = run("drain", "--undo", REDIS_URL=NOBODY)  # listed the servers
    assert undo[0] == 1 and undo[2].startswith("error: --undo needs to know for whom")
    for value in ("nan", "inf", "-1", "2.5", "warm"):  # before it asks for a key
        status, _, err = run("chat", "--temperature", value, SLUICE_API_KEY="")
        assert status == 2 and "--temperature: it is a number from 0 to 2" in err, value
    assert "Give an API key" in run("chat", "--temperature", "2", SLUICE_API_KEY="")[2]
    status, _, err = run("inflight", "--traceback", REDIS_URL="")
    assert status == 1 and "Traceback" in err


@pytest.mark.parametrize("arguments", [["usage"], ["purge"], ["apikey", "list"], ["apikey", "create", "x"]])
def test_a_database_that_was_never_migrated_is_told_with_its_mend(arguments: list[str], tmp_path: Path) -> None:
    status, _, err = run(*arguments, SLUICE_VAR_DIR=str(tmp_path), DATABASE_URL="", REDIS_URL=NOBODY)
    assert status == 1
    (line,) = err.splitlines()
    assert line.startswith("error: ") and line.endswith("run 'manage.py migrate'")


def test_every_command_of_ours_has_the_same_base() -> None:
    ours = {n: app for n, app in get_commands().items() if app == "sluice" or str(app).startswith("apps.")}
    assert {"up", "serve", "runworker", "inflight", "drain", "apikey", "usage", "purge", "chat"} <= set(ours)
    for name, app in ours.items():
        assert isinstance(load_command_class(app, name), Command), name


def test_called_from_code_it_is_still_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "")
    with pytest.raises(CommandError, match="REDIS_URL is not set"):
        call_command("inflight")


def test_servers_and_pools_write_the_same_lines() -> None:
    """``manage.py up`` shows the lines of both."""
    assert settings.LOGGING["formatters"]["text"]["()"] == "inference.logs.LineFormatter"
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "It is %s.", ("late",), None)
    record.created = 0.0
    pool = LineFormatter("pool").format(record)
    assert pool.endswith(" WARNING [pool] It is late.") and pool[:4].isdigit()
    record.request_id = "req-1"
    assert LineFormatter("server").format(record) == pool.replace("[pool]", "[server req-1]")
    record.request_id = "-"
    assert LineFormatter().format(record) == pool.replace("[pool] ", "")
