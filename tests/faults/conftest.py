"""Fixtures of the fault tests: rigs of real processes, and the table of measured times."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/faults" in str(item.fspath):
            item.add_marker(pytest.mark.faults)


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


async def _finish(rig: Rig, request: pytest.FixtureRequest) -> None:
    """After every fault: nothing in flight, and the metrics balance. A test that has failed says enough."""
    if request.node.stash.get(_FAILED, False):
        rig.show()
    else:
        await rig.settled()


@pytest.fixture
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """A rig with the default settings of these tests."""
    async with Rig(tmp_path) as made:
        yield made
        await _finish(made, request)


@pytest.fixture
async def make_rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Any]]:
    """A factory of rigs with other settings (environment variables by name)."""
    async with AsyncExitStack() as stack:
        made: list[Rig] = []

        async def make(**settings: Any) -> Rig:
            made.append(await stack.enter_async_context(Rig(tmp_path, **settings)))
            return made[-1]

        yield make
        for rig in made:
            await _finish(rig, request)


@pytest.fixture
def timing(record_property: Callable[[str, object], None]) -> Callable[[str, float, float], None]:
    """Record a time to clean and hold it against its bound: ``timing(what, seconds, bound)``."""

    def record(what: str, seconds: float, bound: float) -> None:
        # A property of the report: it finds its way to the summary from whichever process ran the test.
        record_property("time to clean", (what, seconds, bound))
        assert seconds <= bound, f"{what}: {seconds:.2f} s, bound {bound:.2f} s"

    return record


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the documents carry: one row per measured fault."""
    times = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "time to clean"
    ]
    if not times:
        return
    terminalreporter.write_sep("-", "time to clean")
    terminalreporter.write_line("| what happens | measured, s | bound, s |")
    terminalreporter.write_line("|---|---|---|")
    worst: dict[str, tuple[float, float]] = {}
    for what, seconds, bound in times:
        worst[what] = max(worst.get(what, (0.0, bound)), (seconds, bound))
    for what, (seconds, bound) in worst.items():
        terminalreporter.write_line(f"| {what} | {seconds:.2f} | {bound:.2f} |")
    if path := os.environ.get("SLUICE_TIMINGS"):
        Path(path).write_text(json.dumps([[w, s, b] for w, (s, b) in worst.items()], indent=1))
