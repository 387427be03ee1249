"""A whole site whose metrics are looked at: Valkey, two server processes, a pool of two workers, one key."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from inference.embedded import EmbeddedValkey
from tests.conftest import ROOT
from tests.support import eventually_sync

#: ``narrow`` runs one request per worker and takes its time for a prompt.
MODELS = "demo=scripted:rate=100,slots=64,faults=1 narrow=scripted:rate=20,slots=1,prefill=20"
TOKEN = "a-token-of-the-tests"
KEY = """
import django
django.setup()
from django.core.management import call_command
from apps.accounts.services import create_key
call_command("migrate", verbosity=0)
print(create_key(None, name="tests").secret)
"""


class Sample:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.series: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(text):
            for s in family.samples:
                self.series[s.name, tuple(sorted(s.labels.items()))] = s.value

    def sum(self, name: str, **labels: str) -> float:
        """Over all series of that name that have these labels."""
        wanted = set(labels.items())
        return sum(v for (n, found), v in self.series.items() if n == name and wanted <= set(found))

    @property
    def names(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        """Series, without those of exchanges that are open just now."""
        return {key for key in self.series if key[0] != "sluice_http_exchanges_inflight"}


class MetricsSite:
    """Starts everything; ``close`` takes it down."""

    def __init__(self, folder: Path, valkey: EmbeddedValkey, *serve: str, **env: str) -> None:
        self.log = folder / "site.log"
        self.counts = tempfile.mkdtemp(prefix="sluice-test-metrics-")
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}",
            "REDIS_URL": valkey.url,
            "SLUICE_MODELS": MODELS,
            "SLUICE_VAR_DIR": str(folder),
            "SLUICE_PRE_DRAIN": "0",
            "SLUICE_DEBUG": "0",
            "SLUICE_LOG_FORMAT": "json",
            "SLUICE_METRICS_TOKEN": TOKEN,
            "SLUICE_HEARTBEAT_INTERVAL": "0.25",
            "SLUICE_HEARTBEAT_TTL": "3",
            "SLUICE_REAP_INTERVAL": "0.25",
            "SLUICE_CHECK_INTERVAL": "0.25",
            "SLUICE_DEVICES": "cpu",
            "SLUICE_WORKERS_PER_DEVICE": "2",
            "DJANGO_SETTINGS_MODULE": "sluice.settings",
            "PROMETHEUS_MULTIPROC_DIR": self.counts,
            **env,
        }
        plain = {k: v for k, v in self.env.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
        made = subprocess.run(
            [sys.executable, "-c", KEY], cwd=ROOT, env=plain, capture_output=True, text=True, timeout=120
        )
        assert made.returncode == 0, made.stderr
        self.key = made.stdout.split()[-1]
        with self.log.open("w") as log:
            self.pool = self._start("runworker", stderr=log)
            self.server = self._start("serve", "--port", "0", *serve, stderr=log, stdout=subprocess.PIPE)
        try:
            assert self.server.stdout is not None
            found = re.search(r"Listening on (http://[^/]+)/", self.server.stdout.readline())
            assert found, self.log.read_text()
            self.url = found[1]
            eventually_sync(self._ready, 120, every=0.1, what="the site is ready")
        except BaseException:
            self.close()  # else it would reap what later tests put into the same Valkey
            raise

    def _start(self, *command: str, **files: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "manage.py", *command], cwd=ROOT, env=self.env, text=True, **files
        )  # fmt: skip

    def _ready(self) -> bool:
        if httpx.get(f"{self.url}/readyz", timeout=10).status_code != 200:
            return False
        return self.scrape().sum("sluice_worker_up", state="ready") == 2

    def scrape(self) -> Sample:
        response = httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, timeout=20)
        assert response.status_code == 200, response.text
        return Sample(response.text)

    def client(self, **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, limits=limits, **options)

    def children(self, process: subprocess.Popen[str]) -> list[int]:
        """Process ids of what a process has started."""
        listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        return [int(pid) for pid in listing.stdout.split()]

    def close(self) -> None:
        for process in (self.server, self.pool):
            process.send_signal(signal.SIGINT)
        for process in (self.server, self.pool):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.server.stdout is not None:
            self.server.stdout.close()
        shutil.rmtree(self.counts, ignore_errors=True)


def at_rest(sample: Sample) -> None:
    """Nothing is in flight, and what was started has ended, once."""
    assert sample.sum("sluice_requests_inflight") == 0
    assert sample.sum("sluice_queue_depth") == 0
    assert sample.sum("sluice_engine_running") == 0
    assert sample.sum("sluice_engine_waiting") == 0
    assert sample.sum("sluice_requests_started_total") == sample.sum("sluice_requests_total")
    assert sample.sum("sluice_request_duration_seconds_count") == sample.sum("sluice_requests_total")
    assert all(value >= 0 for value in sample.series.values())
