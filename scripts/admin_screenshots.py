"""Take the pictures of docs/admin.md from a running system under a scripted load.

    python scripts/admin_screenshots.py [--minutes 6] [--to docs/screenshots]

Needs Chromium and the development requirements. The load comes in waves: answers of different
lengths, some of them left by their clients, some too late for their deadline, and a worker that is
killed once, so that every chart and table has something to show. Nothing shown is made up.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]

from benchmarks.processes import family  # noqa: E402
from inference.embedded import EmbeddedValkey  # noqa: E402
from tests.apps.inflight.test_browser import CHROMIUM, FLAGS, LIST, System  # noqa: E402

WAVE = 100.0
"""Seconds from one crest of the load to the next."""


class Load:
    """Clients in threads, more and fewer by turns."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(14)]
        self._began = time.monotonic()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(30)

    def _wanted(self) -> float:
        """How many clients are busy now."""
        return 6 - 5 * math.cos((time.monotonic() - self._began) * 2 * math.pi / WAVE)

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        headers = {"Authorization": f"Bearer {self.system.key}"}
        with httpx.Client(base_url=self.system.url, headers=headers, timeout=60) as client:
            while not self.stop.wait(chance.uniform(0.1, 0.8)):
                if number < self._wanted():
                    try:
                        self._ask(client, chance)
                    except httpx.HTTPError:
                        continue

    def _ask(self, client: httpx.Client, chance: random.Random) -> None:
        body = {"model": "scripted", "prompt": "hello " * chance.randrange(1, 60), "ignore_eos": True, "stream": True,
                "max_tokens": chance.randrange(10, 120), "temperature": round(chance.random(), 2),
                "timeout": 2 if chance.random() < 0.05 else 60}  # fmt: skip
        leave_after = chance.uniform(0.5, 6) if chance.random() < 0.15 else 60.0
        began = time.monotonic()
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                if time.monotonic() - began > leave_after or self.stop.is_set():
                    return


def shoot(system: System, folder: Path) -> None:
    """All pictures, one browser session each."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        def opened(path: str, width: int = 1440, height: int = 900, scheme: str = "light") -> Any:
            page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
            page.goto(f"{system.url}/accounts/login/?next=/accounts/keys/")
            page.fill("#id_username", "admin")
            page.fill("#id_password", system.password)
            page.click("main button[type=submit]")
            page.wait_for_url("**/keys/")
            page.goto(system.url + path)
            return page

        def picture(name: str, page: Any) -> None:
            page.wait_for_timeout(2500)  # two updates, so that rates are shown
            page.screenshot(path=str(folder / f"{name}.png"))
            page.context.close()

        picture("inflight", opened(LIST, 1440, 760))
        picture("inflight-dark", opened(LIST, 1440, 760, "dark"))
        picture("inflight-mobile", opened(LIST, 360, 1300))
        picture("inflight-workers", opened(f"{LIST}workers/", 1900, 700, "dark"))
        health = opened(f"{LIST}health/", 1440, 700)
        health.click("text=Check now")
        picture("inflight-health", health)
        picture("inflight-endings-mobile", opened(f"{LIST}endings/", 360, 1100, "dark"))
        endings = opened(f"{LIST}endings/", 1440, 860)
        links = re.findall(rf'href="({LIST}request/[^"]+)"', endings.content())
        picture("inflight-endings", endings)
        # One that was on the worker that was killed has the longest timeline.
        request = opened(links[0])
        for link in links:
            if "(attempt 2)" in request.content():
                break
            request.goto(system.url + link)
        picture("inflight-request", request)
        browser.close()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "screenshots")
    args = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sluice.settings")
    with tempfile.TemporaryDirectory() as folder, EmbeddedValkey() as valkey:
        system = System(Path(folder), valkey.url)
        load = Load(system)
        try:
            load.start()
            time.sleep(max(5.0, args.minutes * 60 - 20))
            found = subprocess.run(["pgrep", "-f", r"inference\.worker .*--pool"], capture_output=True, text=True)
            ours = sorted({int(p) for p in found.stdout.split()} & set(family(system.process.pid)))
            if ours:
                os.kill(ours[0], signal.SIGKILL)
            time.sleep(20)
            shoot(system, args.to)
        finally:
            load.end()
            system.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
