"""Take the pictures of docs/chat.md: a conversation with the default model, at three widths, light and dark.

    python scripts/chat_screenshots.py [--to docs/screenshots]

Needs Chromium, the development requirements and the model (``manage.py fetchmodel``). What is shown
is what the model answered; speed is that of the machine, so let it be idle.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]

from inference.config import DEFAULT_MODEL  # noqa: E402
from tests.e2e.chat import ask, wait_done  # noqa: E402
from tests.e2e.conftest import CHROMIUM, FLAGS, open_chat  # noqa: E402
from tests.e2e.site import Site  # noqa: E402

START_SECONDS = 180
ANSWER_MS = 180_000
OTHERS = ("Plan a day in Lisbon", "Explain what a token is", "Name three rivers of France")
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers, and say in one sentence how to call it.",
)


def converse(page: Any) -> None:
    """A list of conversations, the last of them with code in its answer."""
    for other in OTHERS:
        ask(page, other)
        page.wait_for_selector("#stop:not([hidden])")
        page.click("#stop")
        wait_done(page, ANSWER_MS)
        page.click("#new-chat")
    page.click("#open-settings")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "160")
    page.click("#apply-settings")
    for question in QUESTIONS:
        ask(page, question)
        wait_done(page, ANSWER_MS)


def main() -> int:
    """Entry point."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "screenshots")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), start_seconds=START_SECONDS, SLUICE_MODELS=f"{DEFAULT_MODEL}=default")
        try:
            site.start()
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
                cookies = [{**cookie, "url": site.url} for cookie in site.cookies("ada")]

                def opened(width: int, scheme: str, path: str = "/") -> Any:
                    size = {"width": width, "height": 900 if width > 500 else 720}
                    context = browser.new_context(base_url=site.url, viewport=size, color_scheme=scheme)
                    context.add_cookies(cookies)
                    return open_chat(context, path)

                first = opened(1440, "light")
                converse(first)
                for width in (360, 768, 1440):
                    for scheme in ("light", "dark"):
                        page = opened(width, scheme, first.url.removeprefix(site.url))
                        page.wait_for_selector(".message.answer .block")
                        page.screenshot(path=str(args.to / f"chat-{width}-{scheme}.png"))
                        page.context.close()
                browser.close()
        finally:
            site.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
