"""A PostgreSQL of its own for a test: a fresh cluster on a free port, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.conftest import skip_or_fail
from tests.support import eventually_sync, find_free_port

ACCOUNT = "postgres"
"""Whom a root runs it as: PostgreSQL refuses to be root."""


def program(name: str) -> str:
    """Path of one of PostgreSQL's programs; Debian keeps them off the PATH. Skips where there is none."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: int(p.parts[-3]), reverse=True)
    found = shutil.which(name) or (str(places[0]) if places else None)
    if found is None:
        skip_or_fail("no PostgreSQL (Debian: apt install postgresql)")
    return found or ""


class Postgres:
    """Use with ``with``; ``url`` is what DATABASE_URL takes."""

    def __init__(self) -> None:
        self.port = find_free_port()
        self.url = f"postgres://sluice@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        initdb, server = program("initdb"), program("postgres")
        # Not below pytest's folder, which is root's alone.
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-pg-"))
        run: dict[str, Any] = {"cwd": self._folder, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        if os.geteuid() == 0:
            try:
                account = pwd.getpwnam(ACCOUNT)
            except KeyError:
                skip_or_fail(f"PostgreSQL does not run as root, and there is no user {ACCOUNT!r}")
            os.chown(self._folder, account.pw_uid, account.pw_gid)
            run |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        data = str(self._folder / "data")
        try:
            subprocess.run(
                [initdb, "-D", data, "-U", "sluice", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
                check=True, stdout=subprocess.DEVNULL, timeout=60, **run,
            )  # fmt: skip
            with (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [server, "-D", data, "-p", str(self.port), "-h", "127.0.0.1", "-k", str(self._folder), "-F"],
                    stdout=log, **run,
                )  # fmt: skip
            eventually_sync(self._answers, 30, every=0.1, what="PostgreSQL answers")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _answers(self) -> bool:
        import psycopg

        assert self._process is not None and self._process.poll() is None, (self._folder / "log").read_text()
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query gives."""
        import psycopg

        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # without waiting for its clients
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
