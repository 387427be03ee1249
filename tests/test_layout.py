"""What the folders promise: no package hides a standard module, and the core knows no Django."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT


def python(code: str, **env: str) -> str:
    """Run ``code`` in a fresh interpreter at the repository's root, as a user would."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_platform_is_a_plain_folder():
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_the_standard_platform_module_is_found_at_the_root():
    assert python("import platform; print(platform.system())") == os.uname().sysname


def test_the_standard_platform_module_is_found_with_the_root_on_the_path():
    out = python("import platform; print(platform.__file__)", PYTHONPATH=f"{ROOT}:{ROOT / 'platform'}")
    assert not out.startswith(str(ROOT))


def test_importing_the_core_loads_no_django():
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "inference").rglob("*.py"))
        if path.name != "__main__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('django', 'channels', 'apps', 'sluice')])"
    )
    assert python(code).splitlines()[-1] == "[]"


def test_the_core_ships_its_types():
    assert (ROOT / "inference" / "py.typed").exists()


def test_an_old_python_is_told_so_in_one_line():
    code = (
        "import runpy, sys\n"
        "sys.version_info = (3, 9, 1)\n"
        "try: runpy.run_path('manage.py', run_name='__main__')\n"
        "except SystemExit as e: print(e.code)"
    )
    assert python(code) == "Sluice needs Python 3.11 or newer; this is Python 3.9."
