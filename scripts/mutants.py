"""Breaks the code on purpose, one place at a time, and sees that a test fails.

    python scripts/mutants.py [--only WORD] [--list]

``scripts/mutants.toml`` lists the places: each names a clean-up or a check, the
text that makes it up, what to put in its stead, and the tests that should
notice. A mutant that survives is a guarantee that no test holds. The work is
done in a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds for the tests of one mutant
TESTS_FAILED = 1  # pytest's exit code


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="those whose name or file contains WORD")
    parser.add_argument("--list", action="store_true", help="say what there is and do nothing")
    parser.add_argument("--trust", action="store_true", help="do not see first that the tests pass as things are")
    options = parser.parse_args()
    mutants = [m for m in load() if options.only in m.name or options.only in m.file]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file:<45} {mutant.name}")
        return
    if not mutants:
        sys.exit(f"no mutant matches {options.only!r}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        tree = Path(name)
        copy_tree(tree)
        files = sorted({word.split("::")[0] for m in mutants for word in shlex.split(m.tests) if ".py" in word})
        if not options.trust and run(tree, f"{shlex.join(files)} -m 'not model'")[0] != 0:
            sys.exit(f"error: without any mutant, tests fail already in {' '.join(files)}")
        verdicts = {m.name: caught(tree, m) for m in mutants}
    print("\n| what is broken | what notices |\n|---|---|")
    for mutant_name, verdict in verdicts.items():
        print(f"| {mutant_name} | {verdict or '**nothing**'} |")
    survivors = [mutant_name for mutant_name, verdict in verdicts.items() if not verdict]
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} caught.")
    if survivors:
        sys.exit("survived: " + "; ".join(survivors))


def load() -> list[Mutant]:
    with open(ROOT / "scripts" / "mutants.toml", "rb") as file:
        return [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]


def copy_tree(target: Path) -> None:
    """What git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def caught(tree: Path, mutant: Mutant) -> str:
    """Apply, test, take back; gives the test that failed, ``""`` where none did."""
    path = tree / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        print(f"STALE     {mutant.name}: its text stands {source.count(mutant.old)} times in {mutant.file}, not once")
        return ""
    path.write_text(source.replace(mutant.old, mutant.new))
    started = time.monotonic()
    try:
        code, output = run(tree, mutant.tests)
    finally:
        path.write_text(source)
    verdict = "caught" if code == TESTS_FAILED else "SURVIVED" if code == 0 else f"BROKEN (pytest ended with {code})"
    failed = next(
        (x.split()[1] for x in output.splitlines() if x.startswith(("FAILED tests/", "ERROR tests/"))), "a time-out"
    )
    print(f"{verdict:<9} {time.monotonic() - started:4.0f} s  {mutant.name}  {failed}", flush=True)
    return failed.rpartition("::")[2] if code == TESTS_FAILED else ""


def run(tree: Path, tests: str) -> tuple[int, str]:
    """Exit code of pytest (``TESTS_FAILED`` where it hangs) and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    env = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'platform'}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return TESTS_FAILED, process.communicate()[0]
    return process.returncode, output


if __name__ == "__main__":
    main()
