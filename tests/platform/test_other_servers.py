"""The ASGI application under the servers that others bring."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as ws_connect

from inference.embedded import EmbeddedValkey
from tests.conftest import ROOT
from tests.support import eventually_sync

pytestmark = pytest.mark.timeout(90)

COMMANDS = {
    "uvicorn": ["-m", "uvicorn", "sluice.asgi:application", "--port", "{port}"],
    "uvicorn without lifespan": ["-m", "uvicorn", "sluice.asgi:application", "--port", "{port}", "--lifespan", "off"],
    "daphne": ["-m", "daphne", "-p", "{port}", "sluice.asgi:application"],
    "runserver": ["manage.py", "runserver", "--noreload", "{port}"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_serves(
    command: list[str], fresh_valkey: Callable[[], EmbeddedValkey], var_dir: Path, tmp_path: Path, free_port: int
) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
        "REDIS_URL": fresh_valkey().url,
        "SLUICE_MODELS": "scripted=scripted:rate=200",
        "SLUICE_VAR_DIR": str(var_dir),
        "SLUICE_DEBUG": "0",
    }
    url = f"http://127.0.0.1:{free_port}"
    log = tmp_path / "log"
    with log.open("w") as output:
        arguments = [part.format(port=free_port) for part in command]
        process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stdout=output, stderr=output)
    try:

        def up() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(url + "/livez").status_code == 200
            except httpx.TransportError:
                return False

        eventually_sync(up, 40)

        # Started by its first exchange, it loads tokenizers while it answers.
        def waits_for_a_worker() -> bool:
            reasons = httpx.get(url + "/readyz").json()["reasons"]
            assert reasons == ["no worker serves scripted"], reasons
            return True

        eventually_sync(waits_for_a_worker, 20)
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/static/admin/css/base.css").status_code == 200
        assert httpx.get(url + "/admin/login/").status_code == 200
        assert httpx.get(url + "/v1/nope").json()["error"]["code"] == "not_found"
        with pytest.raises(InvalidStatus) as refused:
            ws_connect(f"ws://127.0.0.1:{free_port}/ws/v1/stream")
        assert refused.value.response.status_code in (401, 403)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        process.wait(15)
        assert time.monotonic() - began < 10
        assert "Traceback" not in log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
