"""An Ethernet switch between network namespaces, with cut cables, delay and loss: ``python -m proofs.switch``.

Every port is a TAP device inside a namespace. That works on any kernel with ``tun``; the kernel's own
``netem`` is missing from many (``tc``: *Specified qdisc kind is unknown*), and a bridge alone delays nothing.
As netem on a host's own device would, delay and loss act on what that host sends.

Commands are JSON datagrams to a Unix socket: ``{"port": "s1", "cut": true}``,
``{"port": "s1", "delay": 0.1, "loss": 0.01}``; each is answered with ``ok``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000
_FRAMES_PER_TURN = 64
_BIGGEST = 2048


@dataclass
class Port:
    """One cable of the switch."""

    name: str
    file: int
    cut: bool = False
    delay: float = 0.0
    loss: float = 0.0


@dataclass
class Switch:
    """Forwards frames by learnt addresses; knows nothing of what is in them."""

    ports: dict[str, Port]
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    lost: int = 0
    _table: dict[bytes, Port] = field(default_factory=dict)
    _late: list[tuple[float, int, Port, bytes]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def take(self, port: Port, frame: bytes, now: float) -> None:
        """A host has sent a frame."""
        if port.cut or len(frame) < 14:
            return
        if port.loss and self.chance.random() < port.loss:
            self.lost += 1
            return
        self._table[frame[6:12]] = port
        if port.delay:
            heapq.heappush(self._late, (now + port.delay, next(self._order), port, frame))
        else:
            self._forward(port, frame)

    def release(self, now: float) -> float | None:
        """Forward what is due; seconds until the next frame is."""
        while self._late and self._late[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._late)
            if not port.cut:
                self._forward(port, frame)
        return max(0.0, self._late[0][0] - now) if self._late else None

    def _forward(self, source: Port, frame: bytes) -> None:
        known = None if frame[0] & 1 else self._table.get(frame[:6])
        for target in [known] if known is not None else self.ports.values():
            if target is not source and not target.cut:
                with contextlib.suppress(OSError):  # its queue is full, or the device is gone: a switch drops
                    os.write(target.file, frame)

    def command(self, text: bytes) -> None:
        """Change a port as a datagram says."""
        wanted = json.loads(text)
        port = self.ports[wanted.pop("port")]
        for name, value in wanted.items():
            if name not in ("cut", "delay", "loss"):
                raise ValueError(name)
            setattr(port, name, value)


def tap(namespace: str, address: str) -> int:
    """A TAP device that is ``eth0`` of a namespace; the file behind it.

    Raises:
        OSError: not permitted, or no ``tun`` in this kernel.
        subprocess.CalledProcessError: ``ip`` fails.
    """
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    made = fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"sluice%d", _TAP_WITHOUT_HEADER))
    device = made[:16].rstrip(b"\0").decode()
    for arguments in (
        ["link", "set", device, "netns", namespace],
        ["-n", namespace, "link", "set", device, "name", "eth0"],
        ["-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0"],
        ["-n", namespace, "link", "set", "eth0", "up"],
        ["-n", namespace, "link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return file


def serve(switch: Switch, control: socket.socket) -> None:
    """Forward frames until standard input ends."""
    selector = selectors.DefaultSelector()
    for port in switch.ports.values():
        selector.register(port.file, selectors.EVENT_READ, port)
    selector.register(control, selectors.EVENT_READ, control)
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    wait = None
    while True:
        for key, _ in selector.select(wait):
            if key.data is None:
                return
            if key.data is control:
                text, sender = control.recvfrom(4096)
                try:
                    switch.command(text)
                    answer = b"ok"
                except (ValueError, KeyError) as exc:
                    answer = f"wrong command: {exc!r}".encode()
                control.sendto(answer, sender)
                continue
            _read(switch, key.data)
        wait = switch.release(time.monotonic())


def _read(switch: Switch, port: Port) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_FRAMES_PER_TURN):
            switch.take(port, os.read(port.file, _BIGGEST), time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=Path, required=True, help="path of the Unix socket for commands")
    parser.add_argument("ports", nargs="+", metavar="NAME=NAMESPACE=ADDRESS")
    args = parser.parse_args()
    ports = {}
    for text in args.ports:
        name, namespace, address = text.split("=")
        ports[name] = Port(name, tap(namespace, address))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        control.bind(str(args.control))
        print("ready", flush=True)
        serve(Switch(ports), control)


if __name__ == "__main__":
    main()
