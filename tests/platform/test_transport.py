"""The transport of client connections: what is written at once comes in order, and closing still closes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

#: Twisted has one event loop per process, so this one is another.
SCRIPT = """
import hashlib, json, socket, sys, threading
import daphne.server
from twisted.internet import protocol, reactor
from sluice.server.transport import Transport

way, told, sent, got = sys.argv[1], {}, hashlib.sha1(), hashlib.sha1()

class Writer(protocol.Protocol):
    pieces = 0
    def connectionMade(self):
        self.transport.prompt = True
        self.write()
    def write(self):
        for _ in range(50):
            data = (b"%d," % self.pieces) * 200
            self.pieces += 1
            sent.update(data)
            self.transport.write(data)
        if self.pieces < 3000:
            reactor.callLater(0, self.write)
        elif way == "later":
            reactor.callLater(0.2, self.transport.loseConnection)
        else:
            getattr(self.transport, way)()
    def connectionLost(self, reason):
        reactor.callLater(0, reactor.stop)

listener = socket.create_server(("127.0.0.1", 0))
listener.setblocking(False)
port = reactor.adoptStreamPort(listener.fileno(), listener.family, protocol.Factory.forProtocol(Writer))
port.transport = Transport

def read():
    with socket.create_connection(listener.getsockname()) as client:
        while data := client.recv(5000):
            got.update(data)

reader = threading.Thread(target=read, daemon=True)
reader.start()
reactor.callLater(20, reactor.stop)
reactor.run(installSignalHandlers=False)
reader.join(5)
print(json.dumps({"closed": not reader.is_alive(), "same": sent.digest() == got.digest()}))
"""


@pytest.mark.parametrize("way", ["loseConnection", "loseWriteConnection", "later"])
def test_everything_arrives_and_the_connection_closes(way: str) -> None:
    """``later``: when nothing is left to be sent. It stayed open for good once."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"}
    command = [sys.executable, "-c", SCRIPT, way]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"closed": True, "same": True}
