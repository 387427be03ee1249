"""Ctrl-C in the first moments of a child of ``manage.py up`` ends it without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from inference.children import spawn
from tests.conftest import ROOT


@pytest.mark.parametrize("command", ["runworker", "serve"])
@pytest.mark.timeout(120)
def test_ctrl_c_in_the_first_second_leaves_no_traceback(command: str, redis_url: str) -> None:
    env = {**os.environ, "REDIS_URL": redis_url, "SLUICE_MODELS": "s=scripted:rate=50"}
    arguments = ["--port", "0"] if command == "serve" else []
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8):
        with tempfile.TemporaryFile() as output:
            process = spawn([sys.executable, str(ROOT / "manage.py"), command, *arguments], env=env, output=output)
            time.sleep(delay)  # the moment is what is tested, not waited for
            process.send_signal(signal.SIGINT)
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.terminate()  # the interrupt came while nobody listened: as `up` does, ask once more
                process.wait(20.0)
            output.seek(0)
            said = output.read().decode()
        assert "Traceback" not in said and "KeyboardInterrupt" not in said, f"after {delay} s: {said}"
