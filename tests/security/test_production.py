"""As shipped: the production settings pass Django's own checks, refuse weak ones, and leave probes alone."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

KEY = secrets.token_urlsafe(50)
#: Asks for a page, a probe and the API as a proxy would, and prints status and headers of each.
ASK = """
import asyncio, json, django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from asgiref.testing import ApplicationCommunicator
from sluice.asgi import application

async def get(path, *headers):
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"host", b"localhost"), *headers], "client": ("127.0.0.1", 1), "server": ("localhost", 80),
             "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"}}
    app = ApplicationCommunicator(application, scope)
    await app.send_input({"type": "http.request", "body": b"", "more_body": False})
    start = await app.receive_output(30)
    app.stop(exceptions=False)
    return start["status"], {k.decode().lower(): v.decode() for k, v in start["headers"]}

async def main():
    tls = (b"x-forwarded-proto", b"https")
    print(json.dumps({
        "plain page": await get("/accounts/login/"), "page": await get("/accounts/login/", tls),
        "probe": await get("/livez"), "ready": await get("/readyz"), "api": await get("/v1/models"),
    }))

asyncio.run(main())
"""


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_") and k != "SECRET_KEY"}
    clean |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "SLUICE_PRODUCTION": "true", "SLUICE_VAR_DIR": str(folder)}
    clean |= {"DJANGO_SETTINGS_MODULE": "sluice.settings", "REDIS_URL": "redis://127.0.0.1:1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=90
    )


@pytest.mark.parametrize("extra", [{}, {"SLUICE_BEHIND_PROXY": "1"}, {"SLUICE_BEHIND_PROXY": "1",
                                                                    "SLUICE_HSTS_SUBDOMAINS": "1"}])  # fmt: skip
def test_deployment_check_finds_nothing(tmp_path: Path, extra: dict[str, str]) -> None:
    done = run(tmp_path, "manage.py", "check", "--deploy", "--fail-level", "WARNING", SECRET_KEY=KEY, **extra)
    assert done.returncode == 0, done.stderr
    silenced = 2 * ("SLUICE_HSTS_SUBDOMAINS" not in extra) + ("SLUICE_BEHIND_PROXY" not in extra)
    assert f"no issues ({silenced} silenced)" in done.stdout + done.stderr


def test_deployment_check_would_find_something(tmp_path: Path) -> None:
    extra = {"SLUICE_BEHIND_PROXY": "1", "SLUICE_HSTS_SECONDS": "0"}
    done = run(tmp_path, "manage.py", "check", "--deploy", "--fail-level", "WARNING", SECRET_KEY=KEY, **extra)
    assert done.returncode == 1 and "security.W004" in done.stderr


@pytest.mark.parametrize(
    "key", ["", "short", "a" * 60, "abcdefghij" * 4, "django-insecure-" + KEY],
    ids=["none", "short", "one letter", "ten letters", "insecure"],
)  # fmt: skip
def test_no_start_with_a_weak_key(tmp_path: Path, key: str) -> None:
    done = run(tmp_path, "manage.py", "check", SECRET_KEY=key)
    assert done.returncode == 1 and "SECRET_KEY" in done.stderr
    assert not (tmp_path / "secret_key").exists()
    assert not key or key not in done.stdout + done.stderr


def test_pages_insist_on_tls_and_probes_do_not(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", ASK, SECRET_KEY=KEY, SLUICE_BEHIND_PROXY="1")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    status, headers = answers["plain page"]
    assert (status, headers["location"]) == (301, "https://localhost/accounts/login/")
    assert "strict-transport-security" not in headers
    status, headers = answers["page"]
    assert status == 200
    assert headers["strict-transport-security"] == "max-age=31536000"
    assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "Secure" in headers["set-cookie"] and "SameSite=Lax" in headers["set-cookie"]
    assert answers["probe"][0] == 200
    assert answers["ready"][0] == 503, "answered, and not led elsewhere: there is no Redis"
    assert answers["api"][0] == 401
