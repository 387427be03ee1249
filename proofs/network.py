"""Hosts in network namespaces, wired to :mod:`proofs.switch`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self


class Unavailable(Exception):
    """Namespaces cannot be made here; the message says why."""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Network:
    """Namespaces with one address each on a common segment; use with ``with``.

    Args:
        hosts: name -> address.
        folder: where the switch's command socket goes.
    """

    def __init__(self, hosts: dict[str, str], folder: Path) -> None:
        self.hosts = hosts
        self.control = folder / "switch.sock"
        self._prefix = f"sluice-{os.getpid()}-"
        self._switch: subprocess.Popen[str] | None = None
        self._made: list[str] = []

    def namespace(self, host: str) -> str:
        return self._prefix + host

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:  # also Ctrl-C: namespaces outlive the process
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        try:
            for host in self.hosts:
                _ip("netns", "add", self.namespace(host))
                self._made.append(self.namespace(host))
        except FileNotFoundError:
            raise Unavailable("there is no `ip` command (Debian: iproute2)") from None
        ports = [f"{host}={self.namespace(host)}={address}" for host, address in self.hosts.items()]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "proofs.switch", "--control", str(self.control), *ports],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._switch.stdout is not None
        assert self._switch.stderr is not None
        if self._switch.stdout.readline().strip() != "ready":
            self._switch.wait(5)
            said = self._switch.stderr.read().strip().splitlines()
            raise Unavailable(f"no TAP devices: {said[-1] if said else 'the switch ended'}")

    def close(self) -> None:
        """Take the namespaces down, with everything that still runs in them."""
        for name in self._made:
            with contextlib.suppress(Unavailable):
                for pid in map(int, _ip("netns", "pids", name).split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait(5)
            for stream in (self._switch.stdout, self._switch.stderr):
                if stream is not None:
                    stream.close()
        for name in self._made:
            with contextlib.suppress(Unavailable):
                _ip("netns", "del", name)
        self._made.clear()


def change(control: Path, **wanted: Any) -> None:
    """Tell the switch to change a port: ``port``, ``cut``, ``delay`` (seconds), ``loss`` (0 to 1).

    Raises:
        RuntimeError: it does not know the port or the property.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        own = control.with_name(f"{control.name}.{os.getpid()}")
        sock.bind(str(own))
        sock.settimeout(5)
        try:
            sock.sendto(json.dumps(wanted).encode(), str(control))
            answer = sock.recv(200).decode()
        finally:
            own.unlink()
    if answer != "ok":
        raise RuntimeError(answer)


def netem() -> str:
    """What this kernel says to the tool that usually delays packets; empty where it has it."""
    name = f"sluice-{os.getpid()}-probe"
    _ip("netns", "add", name)
    try:
        done = subprocess.run(
            ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "100ms", "loss", "1%"],
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        return "tc is not installed"
    finally:
        _ip("netns", "del", name)
