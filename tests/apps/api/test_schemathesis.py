"""Requests made up from the OpenAPI document: no 5xx, and errors of the documented shape."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from apps.api import openapi
from tests.apps.api.live import Site

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300), pytest.mark.slow]

schema = schemathesis.openapi.from_dict(openapi.document())


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server(site: Site, case: Any) -> None:
    if isinstance(case.body, dict) and "max_tokens" in case.body and isinstance(case.body["max_tokens"], int):
        case.body["max_tokens"] = min(case.body["max_tokens"], 64)
    response = case.call(base_url=site.url, headers={"Authorization": f"Bearer {site.key}"}, timeout=30)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
