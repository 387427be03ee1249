"""A real HAProxy as the load balancer, and its command socket."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

CONFIG = """\
global
    stats socket {folder}/haproxy.sock mode 600 level admin
    maxconn 2000
    stats timeout 30s
defaults
    mode http
    timeout connect {connect}
    timeout client 100s
    timeout server 100s
    timeout tunnel 100s
    # Only for connections that could not be made; a request is never sent twice.
    retries {retries}
    option redispatch
frontend api
    bind {address}:{port}
    default_backend servers
backend servers
    balance leastconn
    option httpchk
    http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host localhost
    http-check expect status 200
    default-server inter {inter} fall 2 rise 1 {options}
{servers}
"""


def find() -> str:
    """Path of the program.

    Raises:
        SystemExit: it is not installed.
    """
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if not found:
        raise SystemExit("haproxy is not installed (Debian: apt install haproxy); scripts/ensure-tools haproxy does it")
    return found


class HAProxy:
    """Its configuration, and commands to it.

    Args:
        servers: lines below ``backend``, one per server.
        retries: further tries to connect, the last of them to another server.
        inter: time between two readiness checks, as HAProxy writes it; two failures take a server out.
    """

    def __init__(
        self, folder: Path, port: int, servers: list[str], *, address: str = "127.0.0.1", inter: str = "500ms",
        connect: str = "2s", options: str = "", retries: int = 0,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.port = port
        self.path = folder / "haproxy.cfg"
        lines = "\n".join(f"    server {line}" for line in servers)
        self.path.write_text(
            CONFIG.format(
                folder=folder,
                address=address,
                port=port,
                inter=inter,
                connect=connect,
                options=options,
                servers=lines,
                retries=retries,
            )
        )

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
