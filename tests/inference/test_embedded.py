"""The embedded Valkey: private, quiet, and gone when its owner is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import redis

from inference import embedded
from inference.embedded import EmbeddedValkey
from inference.errors import ConfigError
from tests.conftest import ROOT
from tests.support import eventually_sync

OWNER = """
import signal
from inference.embedded import EmbeddedValkey
server = EmbeddedValkey()
print(server.start(), server.pid, flush=True)
signal.pause()
"""


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("unix://")).parent


@pytest.fixture(autouse=True)
def own_base(monkeypatch, tmp_path):
    """A short temporary folder of this test's own: other servers on this machine clean up, too."""
    with tempfile.TemporaryDirectory(prefix="ve-", dir="/tmp") as base:
        monkeypatch.setenv("TMPDIR", base)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(base)


def test_serves_on_a_private_socket_and_keeps_nothing_on_disk():
    with EmbeddedValkey() as server:
        folder = folder_of(server.url)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with redis.Redis.from_url(server.url) as client:
            client.set("a", "b")
            settings = client.config_get("*")
            assert settings["port"] == "0"
            assert settings["save"] == ""
            assert settings["appendonly"] == "no"
            assert settings["maxmemory-policy"] == "noeviction"
        assert psutil.Process(server.pid).net_connections("tcp") == []
        pid = server.pid
    assert not folder.exists()
    assert not psutil.pid_exists(pid)
    server.stop()  # idempotent
    with pytest.raises(RuntimeError):
        _ = server.url


async def test_async_start_and_stop():
    async with EmbeddedValkey() as server:
        folder = folder_of(server.url)
        assert server.exit_code() is None
    assert not folder.exists()


async def test_a_cancelled_stop_still_stops():
    server = EmbeddedValkey()
    await server.astart()
    folder, pid = folder_of(server.url), server.pid
    stopping = asyncio.create_task(server.astop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not folder.exists()
    assert not psutil.pid_exists(pid)


def test_starts_twice_only_after_a_stop():
    server = EmbeddedValkey()
    try:
        first = server.start()
        with pytest.raises(RuntimeError):
            server.start()
        server.stop()
        assert server.start() != first
    finally:
        server.stop()


def test_is_not_reached_by_a_ctrl_c_of_its_owner():
    with EmbeddedValkey() as server:
        assert os.getpgid(server.pid) != os.getpgrp()


def test_dies_with_an_owner_that_is_killed_and_its_folder_goes_at_the_next_start():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    url, pid = owner.stdout.readline().split()
    folder = folder_of(url)
    valkey = psutil.Process(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    try:
        eventually_sync(lambda: not valkey.is_running(), 10, what="valkey gone")
    finally:
        if valkey.is_running():
            valkey.kill()
    assert folder.exists()
    with EmbeddedValkey():
        assert not folder.exists()


def test_leaves_the_folders_of_running_servers_alone():
    with EmbeddedValkey() as server:
        embedded.remove_stale_folders()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_a_binary_that_does_not_start_is_reported_in_one_line(monkeypatch, tmp_path, own_base):
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho 'no memory today'; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_binary", lambda: str(broken))
    with pytest.raises(ConfigError, match=r"code 3: no memory today; set REDIS_URL"):
        EmbeddedValkey().start()
    assert list(own_base.iterdir()) == []


def test_a_server_that_never_answers_is_given_up_and_killed(monkeypatch, tmp_path):
    silent = tmp_path / "valkey-server"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(embedded, "find_binary", lambda: str(silent))
    server = EmbeddedValkey(start_timeout=0.3)
    with pytest.raises(ConfigError, match=r"did not answer within 0\.3 s"):
        server.start()
    assert server.pid is None


def test_without_any_binary_the_mend_is_named(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(embedded.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="set REDIS_URL"):
        embedded.find_binary()


def test_a_long_temporary_folder_falls_back_to_a_short_one(monkeypatch):
    monkeypatch.setattr(embedded.tempfile, "gettempdir", lambda: "/tmp/" + "x" * 90)
    assert embedded._base() == Path("/tmp")
