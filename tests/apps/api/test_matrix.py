"""The matrix of clients in docs/api.md says what the tests do, and with which versions."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.metadata import version
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

DOCS = ROOT / "docs/api.md"
#: What a test of each client must mention: the name of its module or program.
MARKS = {
    "openai": r"openai|sync\(site",
    "langchain-openai": "langchain_openai",
    "litellm": "litellm",
    "httpx-sse": "aconnect_sse",
    "websockets": r"connect\(|opened\(",
    "schemathesis": r"schema\.parametrize",
    "fetch": "FETCH",
    "EventSource": "EVENTS",
    "curl": "curl",
    "sluice-client": r"Client\(",
    "sluice.js": "begin",
    "manage.py chat": r"talk\(|chat",
}


class Row(NamedTuple):
    client: str
    version: str
    what: str
    file: str
    tests: list[str]


def rows() -> list[Row]:
    text = DOCS.read_text().split("## Clients that are tested", 1)[1].split("\n## ", 1)[0]
    out = []
    for line in text.splitlines():
        if not line.startswith("| `"):
            continue
        client, number, what, where = [cell.strip() for cell in line.strip("|").split("|")]
        file, *tests = re.findall(r"`([^`]+)`", where)
        out.append(Row(client.strip("`"), number, what, file, tests))
    return out


@cache
def functions(file: str) -> dict[str, str]:
    """The tests of a file and their source, decorators included."""
    source = (ROOT / file).read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return found


def test_every_client_has_its_row() -> None:
    assert {row.client for row in rows()} == set(MARKS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.client} {row.tests[0]}")
def test_a_row_names_tests_that_use_the_client(row: Row) -> None:
    assert row.tests
    for name in row.tests:
        assert name in functions(row.file), f"{row.file} has no {name}"
        assert re.search(MARKS[row.client], functions(row.file)[name]), f"{name} does not use {row.client}"


@pytest.mark.parametrize("row", [row for row in rows() if row.version[:1].isdigit()], ids=lambda row: row.client)
def test_versions_are_those_installed(row: Row) -> None:
    name = row.client
    if name == "sluice-client":
        project = (ROOT / "clients/python/pyproject.toml").read_text()
        assert f'version = "{row.version}"' in project
    else:
        assert row.version == version(name)


def test_every_test_of_others_clients_is_in_the_matrix() -> None:
    named = {(row.file, name) for row in rows() for name in row.tests}
    for file in ("tests/apps/api/test_clients.py", "tests/apps/api/test_browser.py"):
        missing = {name for name in functions(file) if (file, name) not in named}
        assert not missing
