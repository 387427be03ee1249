"""Requests made up from the OpenAPI document: no 5xx, and errors of the documented shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from apps.api import openapi
from tests.apps.api.live import Site

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300), pytest.mark.slow]

#: How many requests were made of each operation, and what they were answered with.
cases: Counter[str] = Counter()
statuses: Counter[int] = Counter()

schema = schemathesis.openapi.from_dict(openapi.document())


@pytest.fixture(scope="module", autouse=True)
def summary(request: pytest.FixtureRequest) -> Iterator[None]:
    """Say at the end what was tried; docs/api.md shows such a line."""
    yield
    answered = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    failed = sum(count for status, count in statuses.items() if status >= 500)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nschemathesis: {cases.total()} cases, {len(cases)} operations, {failed} server errors ({answered})")


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server(site: Site, case: Any) -> None:
    if isinstance(case.body, dict) and "max_tokens" in case.body and isinstance(case.body["max_tokens"], int):
        case.body["max_tokens"] = min(case.body["max_tokens"], 64)
    response = case.call(base_url=site.url, headers={"Authorization": f"Bearer {site.key}"}, timeout=30)
    cases[case.operation.label] += 1
    statuses[response.status_code] += 1
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
