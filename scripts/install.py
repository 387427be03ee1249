"""Brings .venv to what the requirement files say; does nothing where it is so already.

    python scripts/install.py [--dev]

Called by make with any Python >= 3.11; uses the standard library alone. A stamp
with a hash of the requirement files says what is installed, so that neither a
clock nor a fresh checkout can mislead it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
RUNTIME = ("constraints.txt", "requirements.txt")
DEV = (*RUNTIME, "requirements-dev.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="also what tests, checks and benchmarks need")
    dev = parser.parse_args().dev
    with open(ROOT / ".install.lock", "w") as lock:
        # Two targets may run at once, each in a terminal of its own.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not up_to_date(dev):
            install(dev)


def up_to_date(dev: bool) -> bool:
    stamps = [VENV / "stamp-dev"] if dev else [VENV / "stamp-runtime", VENV / "stamp-dev"]
    wanted = {"stamp-dev": digest(DEV), "stamp-runtime": digest(RUNTIME)}
    return PYTHON.exists() and any(s.exists() and s.read_text() == wanted[s.name] for s in stamps)


def digest(names: tuple[str, ...]) -> str:
    content = "".join((ROOT / name).read_text() for name in names)
    return hashlib.sha256(content.encode()).hexdigest()


def install(dev: bool) -> None:
    started = time.monotonic()
    if not usable():
        print(f"Creating .venv with Python {sys.version.split()[0]} ...", flush=True)
        shutil.rmtree(VENV, ignore_errors=True)
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode:
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit("error: no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv")
    for stamp in VENV.glob("stamp-*"):
        stamp.unlink()
    file = "requirements-dev.txt" if dev else "requirements.txt"
    print(f"Installing {file} into .venv (a few minutes the first time; torch is large) ...", flush=True)
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "-r", str(ROOT / file)]
    # pip says "already satisfied" once per package, which hides what it does.
    quiet = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if not sys.stdout.isatty() else None
    if quiet is None:
        code = subprocess.run(command, check=False).returncode
    else:
        assert quiet.stdout is not None
        for line in quiet.stdout:
            if not line.startswith(("Requirement already satisfied", "Looking in")):
                print(line, end="", flush=True)
        code = quiet.wait()
    if code:
        sys.exit(f"error: pip could not install {file} (its message stands above); mend that and run make again")
    (VENV / "stamp-runtime").write_text(digest(RUNTIME))
    if dev:
        (VENV / "stamp-dev").write_text(digest(DEV))
    print(f"Installed in {time.monotonic() - started:.0f} s.", flush=True)


def usable() -> bool:
    """Whether .venv is whole (an interrupted creation leaves it without pip) and new enough."""
    check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([str(PYTHON), "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; run make again to go on")
