"""A real HAProxy as the load balancer, and its command socket."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "deploy/haproxy.cfg"
"""What is deployed is what is proved: only addresses and times of this file are changed."""


def find() -> str:
    """Path of the program.

    Raises:
        SystemExit: it is not installed.
    """
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if not found:
        raise SystemExit("haproxy is not installed (Debian: apt install haproxy); scripts/ensure-tools haproxy does it")
    return found


def adapt(text: str, *, socket: Path, bind: str, servers: list[str], inter: str, retries: int) -> str:
    """The deployed configuration with these addresses and times, and a command socket.

    Raises:
        ValueError: it lacks a line that is to be changed.
    """
    out: list[str] = []
    left = {"global", "maxconn", "retries", "bind", "default-server", "server"}
    for line in text.splitlines():
        word = line.split()[0] if line.split() else ""
        if word == "server" and word not in left:
            continue
        left.discard(word)
        if word == "global":
            line += f"\n    stats socket {socket} mode 600 level admin"
        elif word == "maxconn":
            line = "    maxconn 1000"  # more would want more open files than many machines allow
        elif word == "retries":
            line = f"    retries {retries}"
        elif word == "bind":
            line = f"    bind {bind}"
        elif word == "default-server":
            line = re.sub(r"inter \S+", f"inter {inter}", line)
        elif word == "server":
            line = "\n".join(f"    server {server}" for server in servers)
        out.append(line)
    if left:
        raise ValueError(f"{SOURCE.name} has no line for {', '.join(sorted(left))}")
    return "\n".join(out) + "\n"


class HAProxy:
    """Its configuration, and commands to it.

    Args:
        servers: ``NAME ADDRESS:PORT`` and what else the line of a server is to say.
        inter: time between two readiness checks, as HAProxy writes it; two failures take a server out.
        retries: further tries to connect, the last of them to another server.
    """

    def __init__(
        self, folder: Path, port: int, servers: list[str], *, address: str = "127.0.0.1", inter: str = "1s",
        retries: int = 0,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.port = port
        self.path = folder / "haproxy.cfg"
        bind = f"{address}:{port}"
        self.path.write_text(
            adapt(
                SOURCE.read_text(), socket=folder / "haproxy.sock", bind=bind, servers=servers, inter=inter,
                retries=retries,
            )
        )  # fmt: skip

    @property
    def command(self) -> list[str]:
        return [find(), "-db", "-f", str(self.path)]

    async def ask(self, line: str) -> str:
        """Send a line to the command socket."""
        reader, writer = await asyncio.open_unix_connection(str(self.folder / "haproxy.sock"))
        try:
            writer.write(line.encode() + b"\n")
            return (await reader.read()).decode().strip()
        finally:
            writer.close()

    async def tell(self, *lines: str) -> None:
        """Send commands, each of which has to succeed."""
        for line in lines:
            reply = await self.ask(line)
            if reply and not reply.startswith(("IP changed", "no need", "port changed", "nothing changed")):
                raise RuntimeError(f"haproxy: {line}: {reply}")

    async def up(self, name: str) -> bool:
        """Whether new requests go to a server."""
        for row in (await self.ask("show stat")).splitlines():
            cells = row.split(",")
            if len(cells) > 17 and cells[1] == name:
                return cells[17].startswith("UP")
        return False


def version() -> str:
    """First line of ``haproxy -v``."""
    done = subprocess.run([find(), "-v"], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split()[:3])
