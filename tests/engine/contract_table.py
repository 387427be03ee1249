"""``pytest tests/engine/test_contract.py --contract-table docs/development.md``: the suite as a table in a document.

A row per test, a column per engine; what is skipped is there with its reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MARKS = ("<!-- contract suite: begin -->", "<!-- contract suite: end -->")
ENGINES = ("scripted", "transformers", "openai")


class ContractTable:
    """A pytest plugin that collects outcomes and writes them between the marks of a document."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, dict[str, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, rest = report.nodeid.partition("::")
        name, _, params = rest.partition("[")
        engine = next((e for e in ENGINES if e in params.rstrip("]").split("-")), "")
        if not engine or not file.endswith("test_contract.py") or (report.passed and report.when != "call"):
            return
        word: str = report.outcome
        if report.skipped:
            word = "skipped: " + str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
        self.outcomes.setdefault(name, {}).setdefault(engine, []).append(word)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        before, begin, rest = self.path.read_text().partition(MARKS[0])
        _, end, after = rest.partition(MARKS[1])
        if not begin or not end:
            raise pytest.UsageError(f"{self.path} has no place for the table: {MARKS[0]} ... {MARKS[1]}")
        self.path.write_text(f"{before}{begin}\n{self.table()}\n{end}{after}")
        terminalreporter.write_line(f"the contract suite's table is in {self.path}")

    def table(self) -> str:
        """Markdown, a row per test."""
        lines = [f"| promise | {' | '.join(ENGINES)} |", "|---|" + "---|" * len(ENGINES)]
        for name, by_engine in self.outcomes.items():
            cells = [_cell(by_engine.get(engine, [])) for engine in ENGINES]
            lines.append(f"| {promise(name)} | {' | '.join(cells)} |")
        return "\n".join(lines)


def promise(name: str) -> str:
    """A test's name as a sentence."""
    return name.removeprefix("test_").replace("_", " ")


def _cell(words: list[str]) -> str:
    if not words:
        return "not run"
    different = list(dict.fromkeys(words))
    return "pass" if different == ["passed"] else "; ".join(different)
