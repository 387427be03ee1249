"""The chat page while the processes behind it die (UI-02)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.chat import answer_text, ask, counted, last_answer, say, wait_done, wait_text
from tests.e2e.conftest import open_chat
from tests.e2e.site import Site
from tests.support import eventually_sync

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.faults]


def test_ui_02_a_killed_worker_is_bridged(make_site: Callable[..., Site], contexts: Callable[..., Any]) -> None:
    site = make_site()
    page = open_chat(contexts(site))
    text = counted(100)
    say(page, text)
    wait_text(page, "epsilon4")
    os.kill(site.workers()[0].pid, signal.SIGKILL)
    wait_done(page, 60_000)
    assert answer_text(page) == text
    assert last_answer(page).locator(".notice").is_hidden()


def test_ui_02_a_server_that_is_terminated_hands_over(
    make_site: Callable[..., Site], contexts: Callable[..., Any]
) -> None:
    """TERM in mid-answer: the generation goes on, and the page comes back to it on the next server."""
    site = make_site()
    page = open_chat(contexts(site))
    text = counted(150)
    say(page, text)
    wait_text(page, "epsilon4")
    assert site.server is not None
    site.server.send_signal(signal.SIGTERM)
    assert site.server.wait(20) == 0
    page.wait_for_selector("#connection:not([hidden])")
    site.start_server()
    wait_done(page, 60_000)
    assert answer_text(page) == text
    assert page.locator("#connection").is_hidden()


def test_ui_02_a_server_that_is_killed_is_bridged(make_site: Callable[..., Site], contexts: Callable[..., Any]) -> None:
    site = make_site()
    page = open_chat(contexts(site))
    text = counted(150)
    say(page, text)
    wait_text(page, "epsilon4")
    assert site.server is not None
    site.server.kill()
    site.server.wait()
    site.start_server()
    wait_done(page, 60_000)
    assert answer_text(page) == text


def test_ui_02_redis_gone_shows_an_error_with_retry(
    make_site: Callable[..., Site], contexts: Callable[..., Any]
) -> None:
    site = make_site(SLUICE_REDIS_OUTAGE_LIMIT="2")
    page = open_chat(contexts(site))
    say(page, counted(400))
    wait_text(page, "epsilon4")
    site.stop_redis()
    answer = wait_done(page, 30_000)
    notice = answer.locator(".notice")
    assert notice.is_visible() and "failed" in (answer.get_attribute("class") or "")
    assert notice.locator("[data-act=retry]").is_visible()
    part = answer_text(page)
    assert "epsilon4" in part
    # The input is usable; what is asked now fails visibly too, and nothing hangs.
    say(page, "Back.", "Are you there?")
    answer = wait_done(page, 30_000)
    assert answer.locator(".notice [data-act=retry]").is_visible()
    site.start_redis()
    eventually_sync(lambda: site.status("/readyz") == 200, 60, what="ready again")
    answer.locator("[data-act=retry]").click()
    wait_text(page, "Back.", 30_000)
    wait_done(page)


def test_pages_on_two_servers_agree(make_site: Callable[..., Site], contexts: Callable[..., Any]) -> None:
    """The server that does not write follows the one that does, and keeps the answer going."""
    site = make_site()
    second = site.start_second_server()
    here = open_chat(contexts(site))
    text = counted(110)
    say(here, text)
    wait_text(here, "gamma2")
    here.wait_for_url("**/c/**")
    there = open_chat(contexts(site, url=second), here.url.replace(site.url, ""))
    wait_text(there, "epsilon4")
    here.close()
    wait_done(there, 60_000)
    assert answer_text(there) == text
    assert last_answer(there).locator(".notice").is_hidden()
    # Stop works from either.
    say(there, counted(300), "Again")
    wait_text(there, "gamma2")
    again = open_chat(contexts(site), there.url.replace(second, ""))
    wait_text(again, "gamma2")
    again.click("#stop")
    wait_done(there)
    site.wait_quiet(2.0)


def test_ui_02_an_error_in_mid_answer_shows_on_its_message(page: Any) -> None:
    ask(page, "Break please [[error@4]]")
    answer = wait_done(page)
    assert "failed" in (answer.get_attribute("class") or "")
    assert answer.locator(".notice").is_visible()
    assert answer.locator("[data-act=retry]").is_visible()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert last_answer(page).locator(".notice").is_visible()
