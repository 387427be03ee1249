"""Brings .venv to what the requirement files say; does nothing where it is so already.

    python scripts/install.py [--dev | --upstream]

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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Environment(NamedTuple):
    """A virtual environment and the files that say what is in it; the last one is what pip installs."""

    folder: Path
    files: tuple[str, ...]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / f"stamp-{self.files[-1]}"


RUNTIME = Environment(ROOT / ".venv", ("constraints.txt", "requirements.txt"))
DEV = Environment(ROOT / ".venv", (*RUNTIME.files, "requirements-dev.txt"))
UPSTREAM = Environment(ROOT / ".venv-upstream", ("constraints.txt", "requirements-upstream.txt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="also what tests, checks and benchmarks need")
    parser.add_argument("--upstream", action="store_true", help="other people's servers, in .venv-upstream")
    options = parser.parse_args()
    wanted = UPSTREAM if options.upstream else DEV if options.dev else RUNTIME
    with open(ROOT / ".install.lock", "w") as lock:
        # Two targets may run at once, each in a terminal of its own.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (up_to_date(wanted) or (wanted is RUNTIME and up_to_date(DEV))):
            install(wanted)


def up_to_date(env: Environment) -> bool:
    return env.python.exists() and env.stamp.exists() and env.stamp.read_text() == digest(env.files)


def digest(names: tuple[str, ...]) -> str:
    content = "".join((ROOT / name).read_text() for name in names)
    return hashlib.sha256(content.encode()).hexdigest()


def install(env: Environment) -> None:
    started = time.monotonic()
    name = env.folder.name
    if not usable(env):
        print(f"Creating {name} with Python {sys.version.split()[0]} ...", flush=True)
        shutil.rmtree(env.folder, ignore_errors=True)
        if subprocess.run([sys.executable, "-m", "venv", str(env.folder)], check=False).returncode:
            shutil.rmtree(env.folder, ignore_errors=True)
            sys.exit("error: no virtual environment could be made; on Debian and Ubuntu: apt install python3-venv")
    for stamp in env.folder.glob("stamp-*"):
        stamp.unlink()
    file = env.files[-1]
    print(f"Installing {file} into {name} (a few minutes the first time; torch is large) ...", flush=True)
    if pip_install(env):
        sys.exit(f"error: pip could not install {file} (its message stands above); mend that and run make again")
    env.stamp.write_text(digest(env.files))
    print(f"Installed in {time.monotonic() - started:.0f} s.", flush=True)


def pip_install(env: Environment) -> int:
    """pip's exit code. Its lines are shown as they come, but for those that say that nothing is to be done."""
    command = [str(env.python), "-m", "pip", "install", "--disable-pip-version-check", "-r", str(ROOT / env.files[-1])]
    if sys.stdout.isatty():
        return subprocess.run(command, check=False).returncode  # with pip's own progress bars
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if not line.startswith(("Requirement already satisfied", "Looking in")):
                print(line, end="", flush=True)
    return pip.returncode


def usable(env: Environment) -> bool:
    """Whether the environment is whole (an interrupted creation leaves it without pip) and new enough."""
    check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([str(env.python), "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; run make again to go on")
