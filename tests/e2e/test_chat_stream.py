"""Streaming, stopping, leaving and coming back, in a real browser (UI-01)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.chat import answer_text, ask, counted, last_answer, say, wait_done, wait_text
from tests.e2e.conftest import open_chat
from tests.e2e.site import Cut, Site
from tests.support import eventually_sync

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG = counted(400)  # about 40 s at the site's pace


def begin_long(page: Any) -> None:
    say(page, LONG)
    wait_text(page, "gamma2")


def test_an_answer_streams_is_stored_and_listed(page: Any, site: Site) -> None:
    say(page, "It **works**.", "Does it work?")
    wait_done(page)
    assert last_answer(page).locator("strong").inner_text() == "works"
    assert "tokens/s" in last_answer(page).locator(".stats").inner_text()
    assert "/c/" in page.url
    assert page.locator(".row-item.current .name").inner_text().startswith("Does it work?")
    assert page.title().startswith("Does it work?")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert answer_text(page) == "It works."


def test_ui_01_stop_stops_the_generation_and_keeps_the_part(page: Any, site: Site) -> None:
    begin_long(page)
    page.click("#stop")
    site.wait_quiet(2.0)
    wait_done(page)
    assert "Stopped." in last_answer(page).locator(".notice").inner_text()
    part = answer_text(page)
    assert LONG.startswith(part) and "gamma2" in part
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert answer_text(page) == part
    # The next message starts at once.
    say(page, "Next.", "And now?")
    wait_text(page, "Next.", 3_000)


def test_ui_01_stop_works_at_once(page: Any, site: Site) -> None:
    """However soon after Enter: only the second click of a double click on Send is not meant for Stop."""
    page.wait_for_function(
        """() => { const stop = document.querySelector('#stop');
        new MutationObserver(() => { if (!stop.hidden) stop.click(); }).observe(stop, {attributes: true});
        return true; }"""
    )
    say(page, LONG)
    wait_done(page)
    site.wait_quiet(2.0)
    assert "Stopped." in last_answer(page).locator(".notice").inner_text()


def test_ui_01_escape_stops(page: Any, site: Site) -> None:
    begin_long(page)
    page.keyboard.press("Escape")
    site.wait_quiet(2.0)
    assert "Stopped." in wait_done(page).locator(".notice").inner_text()


@pytest.mark.parametrize("unload", [True, False])
def test_ui_01_closing_the_tab_stops_the_generation(contexts: Callable[..., Any], site: Site, unload: bool) -> None:
    """Also where the browser ends the page without running its last handlers."""
    context = contexts(site)
    page = open_chat(context)
    begin_long(page)
    page.wait_for_url("**/c/**")
    url = page.url
    page.close(run_before_unload=unload)
    site.wait_quiet(2.0)
    again = open_chat(context, url)
    assert LONG.startswith(answer_text(again))
    assert "page was closed" in last_answer(again).locator(".notice").inner_text()


def test_ui_01_navigating_away_stops_and_back_shows_the_part(page: Any, site: Site) -> None:
    begin_long(page)
    page.goto("/livez")
    site.wait_quiet(2.0)
    page.go_back()
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector(".notice:not([hidden])")
    assert "gamma2" in answer_text(page)
    say(page, "Fine.")
    wait_text(page, "Fine.")


def test_ui_01_double_click_sends_once(page: Any, site: Site) -> None:
    before = sum(site.outcomes().values())
    page.fill("#input", "Twice? [[say:Once.]]")
    page.dblclick("#send")
    wait_done(page)
    assert page.locator(".message.user").count() == 1
    assert answer_text(page) == "Once."
    eventually_sync(lambda: site.live() == 0, 2)
    assert sum(site.outcomes().values()) == before + 1


def test_reload_in_mid_answer_resumes_the_same_stream_without_a_gap(page: Any, site: Site) -> None:
    text = counted(80)
    begun = sum(site.outcomes().values())
    say(page, text)
    wait_text(page, "epsilon4")
    page.wait_for_url("**/c/**")
    for _ in range(2):
        page.reload()
        page.wait_for_selector("html[data-ready]")
        page.wait_for_selector(".answer.live .block")
    wait_done(page)
    assert answer_text(page) == text
    assert sum(site.outcomes().values()) == begun + 1


def test_lost_network_resumes_without_a_gap(contexts: Callable[..., Any], site: Site, cut: Cut) -> None:
    page = open_chat(contexts(site, url=f"http://127.0.0.1:{cut.port}"))
    text = counted(80)
    say(page, text)
    wait_text(page, "epsilon4")
    cut.down()
    page.wait_for_selector("#connection:not([hidden])")
    page.wait_for_timeout(2500)  # longer than a page that goes is waited for
    cut.up = True
    wait_done(page)
    assert answer_text(page) == text
    assert page.locator("#connection").is_hidden()


def test_two_tabs_agree(contexts: Callable[..., Any], site: Site) -> None:
    context = contexts(site)
    one = open_chat(context)
    say(one, "First.")
    wait_done(one)
    two = open_chat(context, one.url)
    text = counted(60)
    say(one, text, "Second?")
    wait_text(two, "beta1")
    # The second goes on when the first has gone.
    one.close()
    wait_done(two)
    assert answer_text(two) == text
    assert two.locator(".message").count() == 4


def test_waiting_shows_the_place_in_the_queue(make_site: Callable[..., Site], contexts: Callable[..., Any]) -> None:
    site = make_site(target="rate=60,say=1,slots=1")
    context = contexts(site)
    pages = [open_chat(context) for _ in range(3)]
    say(pages[0], LONG)
    wait_text(pages[0], "beta1")
    for page in pages[1:]:
        ask(page, "Me too [[say:yes]]")
        page.wait_for_function("() => document.querySelector('.waiting-text')?.textContent")
    # The place is asked for about twice a second; until then the page only says that it waits.
    pages[2].wait_for_function(
        "() => document.querySelector('.waiting-text')?.textContent.includes('ahead in the queue')"
    )
    pages[1].click("#stop")
    wait_done(pages[1])
    pages[0].click("#stop")
    wait_done(pages[2])
    assert answer_text(pages[2]) == "yes"


def test_real_first_token_is_shown_at_once(page: Any, site: Site) -> None:
    """The first render arrives while the answer is short: nothing is held back to be sent together."""
    page.evaluate(
        """() => { window.sizes = []; const list = document.querySelector('#messages');
        new MutationObserver(() => { const c = [...list.querySelectorAll('.answer .content')].at(-1);
          if (c && c.textContent) window.sizes.push(c.textContent.length); })
        .observe(list, {subtree: true, childList: true, characterData: true}); }"""
    )
    say(page, counted(40))
    wait_done(page)
    sizes = page.evaluate("window.sizes")
    assert sizes[0] <= 6
    assert len(set(sizes)) > 20
