"""One walk through the page with the real default model behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.chat import answer_text, ask, last_answer, wait_done
from tests.e2e.conftest import open_chat
from tests.e2e.site import Site

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_real_answer_is_stopped_and_continued(make_site: Callable[..., Site], contexts: Callable[..., Any]) -> None:
    site = make_site(SLUICE_MODELS="smollm2-135m-instruct=default", start_seconds=400)
    page = open_chat(contexts(site))
    ask(page, "Write a long story about a river and the town beside it.")
    page.wait_for_function(
        "() => document.querySelector('.answer .content')?.textContent.split(' ').length > 4", timeout=120_000
    )
    page.click("#stop")
    wait_done(page)
    site.wait_quiet(2.0)
    part = answer_text(page)
    assert part
    last_answer(page).locator("[data-act=continue]").click()
    page.wait_for_function(
        "length => document.querySelector('.answer .content').textContent.length > length + 10",
        arg=len(part),
        timeout=120_000,
    )
    page.keyboard.press("Escape")
    wait_done(page)
    assert answer_text(page).startswith(part[:20].rstrip())
    site.wait_quiet(2.0)
