"""A whole site of its own: Valkey, a worker pool with scripted models, a server, keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from inference.embedded import EmbeddedValkey
from tests.conftest import ROOT
from tests.support import eventually_sync

MODELS = (
    "demo=scripted:rate=0,say=1,faults=1 slow=scripted:rate=20,say=1,faults=1,context=2048 one=scripted:rate=20,slots=1"
)


START_SECONDS = 90
#: One process instead of six: database, a superuser, and the keys, printed in order.
SET_UP = """
import django
django.setup()
from django.contrib.auth.models import User
from django.core.management import call_command
from apps.accounts.services import create_key
call_command("migrate", verbosity=0)
root = User.objects.create_superuser("root", "", "a password of the tests")
print(create_key(None, name="first").secret, create_key(None, name="second").secret)
print(create_key(None, name="boss", user=root, scopes=["generate", "read", "admin"]).secret)
print(create_key(None, name="narrow", allowed_models=["demo"]).secret)
print(create_key(None, name="slow", limits={"requests_per_minute": 2, "max_tokens_per_request": 20}).secret)
"""


@dataclass
class Site:
    """Addresses and keys of a running site.

    Attributes:
        key: may generate and read. admin: also everything else. other: another
            ordinary key. demo_only: may use the model ``demo`` alone. limited: two
            requests a minute, 20 tokens each.
    """

    url: str
    key: str
    admin: str
    other: str
    demo_only: str
    limited: str
    log: Path
    env: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    @asynccontextmanager
    async def client(self, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30) as client:
            yield client


def start(folder: Path, valkey: EmbeddedValkey, models: str = MODELS, **settings: str) -> Site:
    """Bring a site up; ``stop`` takes it down. ``settings`` are environment variables."""
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
        "REDIS_URL": valkey.url,
        "SLUICE_MODELS": models,
        "SLUICE_VAR_DIR": str(folder),
        "SLUICE_PRE_DRAIN": "0",
        "SLUICE_PING_INTERVAL": "0.3",
        "SLUICE_MAX_QUEUED": "20",
        "SLUICE_DEBUG": "0",
        "DJANGO_SETTINGS_MODULE": "sluice.settings",
        **settings,
    }

    done = subprocess.run(
        [sys.executable, "-c", SET_UP], cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_SECONDS
    )
    assert done.returncode == 0, done.stderr
    key, other, admin, demo_only, limited = done.stdout.split()[-5:]
    log = (folder / "server.log").open("w")
    pool = subprocess.Popen(
        [sys.executable, "manage.py", "runworker", "--devices", "cpu"], cwd=ROOT, env=env, stderr=log, text=True
    )
    server = subprocess.Popen(
        [sys.executable, "manage.py", "serve", "--port", "0"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    log.close()  # the processes have their own
    site = Site("", key, admin, other, demo_only, limited, folder / "server.log", env, [server, pool])
    try:
        _wait(site, server)
    except BaseException:
        stop(site)
        raise
    return site


def _wait(site: Site, server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.search(r"Listening on (http://[^/]+)/", line)
    assert found, site.log.read_text()
    site.url = found[1]

    def ready() -> bool:
        return httpx.get(f"{site.url}/readyz").status_code == 200

    eventually_sync(ready, START_SECONDS, every=0.1, what=f"the site is ready; log:\n{site.log.read_text()}")


def stop(site: Site) -> None:
    for process in site.processes:
        process.terminate()
    for process in site.processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def another_server(site: Site, *, ready: str = "/readyz", **env: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A second server of the site: its address, and its process, which the caller may end.

    Args:
        ready: what answers 200 once it can be asked.
    """
    with site.log.open("a") as log:
        server = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--port", "0"],
            cwd=ROOT,
            env={**site.env, **env},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert server.stdout is not None
    try:
        found = re.search(r"Listening on (http://[^/]+)/", server.stdout.readline())
        assert found, site.log.read_text()
        eventually_sync(
            lambda: httpx.get(f"{found[1]}{ready}").status_code == 200, START_SECONDS, every=0.1, what="it is ready"
        )
        yield found[1], server
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def at(site: Site, url: str) -> Site:
    """The same site by way of another server."""
    return replace(site, url=url)


async def ended(site: Site, **labels: str) -> float:
    """Requests that have ended so, as the metrics of the site's server count them."""
    async with site.client(site.admin) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    counted = [line for line in lines if line.startswith("sluice_requests_total{") and all(w in line for w in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counted)


def new_key(site: Site) -> str:
    """One more key."""
    return manage(site, "apikey", "create", "brief", "--quiet").strip()


def manage(site: Site, *arguments: str) -> str:
    """What a management command prints."""
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=site.env,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat body for the model ``demo``."""
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    return {**body, **fields}


def events(raw: str) -> list[str]:
    """The data of each event of a finished stream; comments are left out."""
    assert "\r" not in raw
    blocks = [block for block in raw.split("\n\n") if block and not block.startswith(":")]
    return [line[6:] for block in blocks for line in block.split("\n") if line.startswith("data: ")]
