"""Responses that may be continued: what is kept comes back as it was, on both databases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from apps.api import models
from tests.apps.api.asking import RESPONSES
from tests.apps.api.live import Site
from tests.conftest import ROOT
from tests.postgres import Postgres

ODD = 'NUL \x00, a quote ", \u2028, 👨‍👩‍👧, \\u0000, </script>'
KEEP = """
import json, sys
import django; django.setup()
from django.core.management import call_command
from apps.api import models
call_command("migrate", verbosity=0)
text = json.loads(sys.argv[1])
models.keep("resp_1", "key:x", [{"role": "user", "content": text}], {"output": text}, 60)
kept = models.find("resp_1")
print(json.dumps([kept.messages()[0]["content"], kept.body()["output"]]))
models.forget("resp_1")
assert models.find("resp_1") is None
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as running:
        yield running


def test_any_text_is_kept_on_postgresql(postgres: Postgres) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "DATABASE_URL": postgres.url}
    env["DJANGO_SETTINGS_MODULE"] = "sluice.settings"
    done = subprocess.run(
        [sys.executable, "-c", KEEP, json.dumps(ODD)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [ODD, ODD]


async def test_any_text_is_kept_and_continued(site: Site) -> None:
    asked = {"model": "demo", "input": "[[say:a\x00b]]", "max_output_tokens": 50}
    async with site.client() as client:
        first = (await client.post(RESPONSES, json=asked)).json()
        assert first["output"][0]["content"][0]["text"] == "a\x00b"
        assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first
        more = {**asked, "input": "go on", "previous_response_id": first["id"], "max_output_tokens": 2}
        second = (await client.post(RESPONSES, json=more)).json()
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]


@pytest.mark.django_db
def test_an_id_with_nul_costs_no_query(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):  # PostgreSQL would refuse it, and the caller would be told that it is away
        assert models.find("resp_\0") is None
