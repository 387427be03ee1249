"""The scripts behind make: which Python is taken, when .venv is rebuilt, and that the mutants still fit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def find_python(tmp_path: Path, versions: dict[str, str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run find-python where only fake Pythons of these versions are on the PATH."""
    for name, version in versions.items():
        new_enough = int(version.split(".")[1]) >= 11
        fake = tmp_path / name
        fake.write_text(
            f'#!/bin/sh\n[ "$1" = -V ] && echo "Python {version}" && exit 0\nexit {0 if new_enough else 1}\n'
        )
        fake.chmod(0o755)
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "find-python")],
        env={"PATH": str(tmp_path), **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_first_python_that_is_new_enough_is_taken(tmp_path):
    assert find_python(tmp_path, {"python3": "3.9.2", "python3.12": "3.12.1"}).stdout.strip() == "python3.12"
    assert find_python(tmp_path, {"python3": "3.11.0"}).stdout.strip() == "python3"


def test_an_old_python_is_refused_in_one_line(tmp_path):
    done = find_python(tmp_path, {"python3": "3.9.2"})
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "needs Python 3.11 or newer, and this machine has Python 3.9.2" in done.stderr


def test_a_python_that_was_named_is_not_replaced_by_another(tmp_path):
    done = find_python(tmp_path, {"python3": "3.12.0", "old": "3.8.1"}, PYTHON=str(tmp_path / "old"))
    assert done.returncode == 1
    assert "is Python 3.8.1" in done.stderr


class TestInstall:
    @pytest.fixture
    def install(self, tmp_path, monkeypatch):
        module = load("install")
        monkeypatch.setattr(module, "ROOT", tmp_path)
        for name in ("constraints.txt", "requirements.txt", "requirements-dev.txt"):
            (tmp_path / name).write_text(name)
        return module

    def env(self, install, tmp_path, *files):
        return install.Environment(tmp_path / ".venv", files)

    def test_is_up_to_date_by_content_and_not_by_time(self, install, tmp_path):
        env = self.env(install, tmp_path, "constraints.txt", "requirements.txt")
        assert not install.up_to_date(env)
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        env.python.write_text("")
        env.stamp.write_text(install.digest(env.files))
        assert install.up_to_date(env)
        os.utime(tmp_path / "requirements.txt")
        assert install.up_to_date(env)
        (tmp_path / "constraints.txt").write_text("other")
        assert not install.up_to_date(env)

    def test_an_environment_without_pip_is_not_usable(self, install, tmp_path):
        env = self.env(install, tmp_path, "requirements.txt")
        assert not install.usable(env)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
        assert not install.usable(env)


def test_torch_is_pinned_exactly_and_not_held_by_its_local_build():
    assert "torch==2.13.0\n" in (ROOT / "requirements.txt").read_text()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert not [line for line in lines if line.startswith("torch==")]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt", "requirements-upstream.txt"])
def test_everything_is_pinned_and_explained(name):
    reasons = (ROOT / "docs" / "dependencies.md").read_text().lower()
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", "-")):
            package, sep, version = line.partition("==")
            assert sep, f"{line} is not pinned"
            assert version
            assert package.partition("[")[0].lower() in reasons, f"{package} has no reason in docs/dependencies.md"


MUTANTS = load("mutants")


@pytest.mark.parametrize("mutant", MUTANTS.load(), ids=lambda m: m.name)
def test_a_mutant_still_fits_the_code(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
