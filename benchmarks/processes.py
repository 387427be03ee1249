"""Start servers for a benchmark, read what they use, and stop them whatever happens."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def machine() -> str:
    """A line that names the machine."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, Linux {platform.release()}"


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of the processes, user and system."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICK


def resident_mib(pids: list[int]) -> float:
    """Resident memory of the processes, MiB."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * _PAGE / 2**20


@contextlib.contextmanager
def running(
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    cpu: int | None = None,
    ready: str = "",
    below: int = 500,
    patience: float = 60.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, on one processor where ``cpu`` is given, until the block is left.

    Args:
        ready: a URL that answers with a status under ``below`` once the command serves, within
            ``patience`` seconds.
    """
    # Whoever ends the benchmark (a timeout) ends what it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    log = open(f"/tmp/sluice-bench-{os.getpid()}.log", "ab")  # noqa: SIM115
    pin = ["taskset", "-c", str(cpu)] if cpu is not None else []
    process = subprocess.Popen(
        [*pin, *command],
        cwd=ROOT,
        env=environment(env or {}),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        if ready:
            _wait(ready, process, below, patience)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(8)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def _wait(url: str, process: subprocess.Popen[bytes], below: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except urllib.error.HTTPError as exc:
            if exc.code < below:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} did not answer within {seconds:.0f} s")


def python(*args: str) -> list[str]:
    return [sys.executable, *args]


def manage(*args: str) -> list[str]:
    """The command line of a management command."""
    return python("manage.py", *args)


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Of a process of ours: this one's, and these settings."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", **settings}


def first_key(settings: Mapping[str, str]) -> str:
    """Make the tables of the database and an API key."""
    env = environment(settings)
    subprocess.run(manage("migrate", "--noinput", "-v", "0"), cwd=ROOT, env=env, check=True)
    create = manage("apikey", "create", "bench", "--quiet")
    return subprocess.run(create, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
