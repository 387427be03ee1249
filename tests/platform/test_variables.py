"""Names of settings that nothing reads are said, once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sluice import variables
from tests.conftest import ROOT
from tests.platform.test_command_errors import NOBODY, run
from tests.platform.test_settings_table import fields, read_by_hand, table

_NAME = re.compile(r"\bSLUICE_[A-Z][A-Z_]*[A-Z]\b")
#: Named in the documents, and read by tests alone.
TESTS = {"SLUICE_SCALE", "SLUICE_FUZZ_SECONDS", "SLUICE_FUZZ_EXAMPLES"}


def test_all_that_the_code_reads_and_the_documents_name_is_known() -> None:
    read = {name for name in set(fields()) | read_by_hand() | set(table()) if name.startswith("SLUICE_")}
    assert read <= variables.known()
    internal = {variables.SAID, "SLUICE_WORKER_DEVICE"}  # from one of our processes to another
    assert variables.known() - read == internal, "nothing reads the others"
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(p for p in (ROOT / "deploy").rglob("*") if p.is_file()),
    ]
    named = {name for page in pages for name in _NAME.findall(page.read_text(encoding="utf-8"))}
    assert {n for n in named - variables.known() - TESTS if not n.startswith("SLUICE_TEST_")} == set()


def test_what_is_near_is_offered_and_what_kubernetes_sets_is_passed_over() -> None:
    environ = {
        "SLUICE_PROCESES": "4", "SLUICE_COLOUR": "red", "SLUICE_MODELS": "m=default", "SLUICE_TEST_REDIS": "x",
        "OTHER_SETTING": "x", "SLUICE_REDIS_SERVICE_HOST": "10.0.0.1", "SLUICE_REDIS_PORT": "tcp://10.0.0.1:6379",
        "SLUICE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1", "SLUICE_REDIS_SERVICE_PORT_REDIS": "6379",
    }  # fmt: skip
    assert variables.unknown(environ) == [
        "SLUICE_COLOUR is no setting and has no effect; docs/operations.md has all.",
        "SLUICE_PROCESES is no setting and has no effect; did you mean SLUICE_PROCESSES?",
    ]
    assert variables.unknown(environ) == [], "it has been said"


@pytest.mark.parametrize("command", ["serve", "runworker"])
def test_it_is_said_before_anything_that_may_follow_from_it(command: str, tmp_path: Any) -> None:
    """Where the database or Redis is at fault because its name was misspelt, that stands first."""
    settings = {"SLUICE_VAR_DIR": str(tmp_path), "DATABASE_URL": "", "REDIS_URL": NOBODY, "SLUICE_MODLES": "secret"}
    status, out, err = run(command, **settings)
    assert (status, out) == (1, "")
    first, *rest = err.splitlines()
    assert first == "Warning: SLUICE_MODLES is no setting and has no effect; did you mean SLUICE_MODELS?"
    assert len(rest) == 1 and rest[0].startswith("error: ")
