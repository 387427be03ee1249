"""Ctrl-C once and twice, as the process tree of ``manage.py up`` passes it on."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

# A child that says which signals it hears, and ends with the second one only.
CHILD = """
import signal
heard = []
def hear(number, frame):
    heard.append(number)
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, hear)
print("ready", flush=True)
while len(heard) < 2:
    signal.pause()
"""
# The parent gets its second signal once the child has heard of the first, and would wait for half an hour without it.
PARENT = """
import os, signal, subprocess, sys, threading
from sluice import tree
tree.PATIENCE = 1800.0
signals = tree.Signals()
signals.install()
child = tree.Child("child", grace=1800.0, hurried=1800.0)
child.process = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True,
                                 start_new_session=True)
assert child.process.stdout.readline() == "ready\\n"
def again():
    print(child.process.stdout.readline().strip(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print(child.process.stdout.readline().strip(), flush=True)
thread = threading.Thread(target=again)
thread.start()
os.kill(os.getpid(), signal.SIGINT)
print("clean" if child.stop(signals) else "killed", flush=True)
thread.join()
"""


def test_a_second_ctrl_c_hurries() -> None:
    """It used to change nothing: what ran had its seconds, however often somebody pressed the keys."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "platform")])
    done = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["SIGINT", "SIGTERM", "clean"]
