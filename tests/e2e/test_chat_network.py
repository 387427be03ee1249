"""The network goes away before an answer is sent, while it is queued, at its first token, and at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.chat import answer_text, ask, counted, last_answer, say, wait_done, wait_text
from tests.e2e.conftest import open_chat
from tests.e2e.site import Cut, Site
from tests.e2e.wire import Wire, eventually
from tests.support import eventually_sync

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site that writes one answer at a time."""
    site = Site(tmp_path_factory.mktemp("narrow"), target="rate=60,say=1,faults=1,slots=1,context=40000")
    try:
        yield site.start()
    finally:
        site.close()


@pytest.fixture
def cut(narrow: Site) -> Iterator[Cut]:
    cut = Cut(narrow.port)
    yield cut
    cut.close()


@pytest.fixture
def page(contexts: Callable[..., Any], narrow: Site, cut: Cut) -> Any:
    """A page behind a network that can be cut."""
    return open_chat(contexts(narrow, url=f"http://127.0.0.1:{cut.port}"))


@pytest.fixture
def busy(contexts: Callable[..., Any], narrow: Site, page: Any) -> Iterator[Any]:
    """Another page, whose answer keeps the only slot."""
    other = open_chat(contexts(narrow))
    say(other, counted(900))
    wait_text(other, "beta1")
    yield other
    narrow.wait_quiet(10.0)


def gone(page: Any, cut: Cut) -> None:
    cut.down()
    page.wait_for_selector("#connection:not([hidden])")


def back(page: Any, cut: Cut) -> None:
    cut.up = True
    page.wait_for_selector("#connection", state="hidden")


def ended(site: Site) -> int:
    return sum(site.outcomes().values())


def waits(page: Any) -> None:
    page.wait_for_function("() => document.querySelector('.waiting-text')?.textContent.includes('queue')")


def test_sent_while_the_network_is_gone(page: Any, narrow: Site, cut: Cut) -> None:
    before = ended(narrow)
    gone(page, cut)
    say(page, "Later.", "Now?")
    page.wait_for_selector(".answer.live")
    back(page, cut)
    wait_done(page)
    assert answer_text(page) == "Later."
    assert page.locator(".message").count() == 2
    eventually_sync(lambda: ended(narrow) == before + 1, 10, what="it was generated once")


@pytest.mark.parametrize("lost", ["generate", "accepted"])
def test_lost_on_the_way_there_or_back(contexts: Callable[..., Any], narrow: Site, lost: str) -> None:
    """The connection breaks after the message was sent, before it is known to have come."""
    wire = Wire(lost)
    page = open_chat(contexts(narrow), prepare=wire.lay)
    before = ended(narrow)
    say(page, "Once.", "Now?")
    eventually(page, lambda: wire.kept)
    wire.cut()
    wait_done(page)
    assert wire.sockets == 2
    assert answer_text(page) == "Once."
    eventually_sync(lambda: ended(narrow) == before + 1, 10, what="it was generated once")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".message").count() == 2


def test_not_sent_when_the_page_is_loaded_again(contexts: Callable[..., Any], narrow: Site) -> None:
    """What the server has not got is a draft then; what it has got without the page's knowing is none."""
    wire = Wire("generate")
    page = open_chat(contexts(narrow), prepare=wire.lay)
    before = ended(narrow)
    for lost, messages in (("generate", 0), ("accepted", 4)):
        text = f"Now? [[say:Lost {lost}.]]"
        wire.keep = {lost}
        ask(page, text)
        eventually(page, lambda: wire.kept)
        wire.keep.clear()
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert page.locator(".message").count() == messages
        if lost == "generate":
            assert page.input_value("#input") == text
            page.press("#input", "Enter")
        wait_text(page, f"Lost {lost}.")
        wait_done(page)
        assert page.input_value("#input") == ""
    eventually_sync(lambda: ended(narrow) == before + 2, 10, what="each was generated once")


def test_a_page_that_was_made_before_an_edit_came_looks_again(contexts: Callable[..., Any], narrow: Site) -> None:
    """Loaded again at once after the edit, it showed the branch before for good, and the edit as a draft."""
    wire = Wire()
    page = open_chat(contexts(narrow), prepare=wire.lay)
    say(page, "One.", "Old?")
    wait_done(page)
    page.wait_for_url("**/c/**")
    page.reload()
    made_before = json.dumps(page.text_content("#boot"))
    wire.keep = {"accepted"}
    page.hover(".message.user")
    page.click(".message.user [data-act=edit]")
    page.fill(".editor textarea", "New? [[say:Two.]]")
    page.press(".editor textarea", "Enter")
    eventually(page, lambda: wire.kept)
    wire.keep.clear()
    page.add_init_script(
        "document.addEventListener('readystatechange', () => { if (document.readyState === 'interactive')"
        f" document.getElementById('boot').textContent = {made_before}; }})"
    )
    page.reload()
    wait_text(page, "Two.")
    wait_done(page)
    assert page.locator(".message").count() == 2
    assert page.input_value("#input") == ""


def test_a_draft_is_kept_although_it_says_what_was_asked_before(contexts: Callable[..., Any], narrow: Site) -> None:
    page = open_chat(contexts(narrow))
    text = "Go on. [[say:Gone on.]]"
    ask(page, text)
    wait_text(page, "Gone on.")
    wait_done(page)
    page.fill("#input", text)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.input_value("#input") == text


def test_sent_and_stopped_while_the_network_is_gone(page: Any, narrow: Site, cut: Cut) -> None:
    gone(page, cut)
    say(page, counted(900), "Now?")
    page.wait_for_selector(".answer.live")
    page.keyboard.press("Escape")
    back(page, cut)
    wait_done(page)
    assert "Stopped." in last_answer(page).locator(".notice").inner_text()
    narrow.wait_quiet(10.0)
    say(page, "Fine.", "And now?")
    wait_text(page, "Fine.")


def test_escape_in_the_queue(page: Any, narrow: Site, busy: Any) -> None:
    ask(page, "Me too [[say:yes]]")
    waits(page)
    page.keyboard.press("Escape")
    wait_done(page)
    assert "Stopped." in last_answer(page).locator(".notice").inner_text()
    assert answer_text(page) == ""
    eventually_sync(lambda: narrow.live() == 1, 10, what="only the other is left")
    # What was stopped can be asked for again, and is what comes next.
    last_answer(page).locator("[data-act=retry]").click()
    waits(page)
    busy.click("#stop")
    wait_text(page, "yes")
    wait_done(page)


@pytest.mark.parametrize("stopped", [False, True])
def test_gone_in_the_queue(page: Any, narrow: Site, cut: Cut, busy: Any, stopped: bool) -> None:
    """What was pressed meanwhile is heard as soon as there is a network."""
    ask(page, "Me too [[say:yes]]")
    waits(page)
    gone(page, cut)
    if stopped:
        page.keyboard.press("Escape")
    back(page, cut)
    if stopped:
        wait_done(page)
        busy.click("#stop")
        assert "Stopped." in last_answer(page).locator(".notice").inner_text()
    else:
        waits(page)
        busy.click("#stop")
        wait_text(page, "yes")
        wait_done(page)
        assert answer_text(page) == "yes"


def test_gone_as_the_first_token_comes(page: Any, narrow: Site, cut: Cut, busy: Any) -> None:
    ask(page, f"Me too [[say:{counted(40)}]]")
    waits(page)
    gone(page, cut)
    busy.click("#stop")
    wait_done(busy)
    eventually_sync(lambda: narrow.running() == 1, 10, what="it is being written")
    back(page, cut)
    wait_done(page)
    assert answer_text(page) == counted(40)


def test_gone_as_it_ends(page: Any, narrow: Site, cut: Cut) -> None:
    """It is whole when the page comes back, with what only its end tells."""
    say(page, counted(30))
    wait_text(page, "beta1")
    gone(page, cut)
    narrow.wait_quiet(30.0)
    back(page, cut)
    wait_done(page)
    assert answer_text(page) == counted(30)
    assert "tokens/s" in last_answer(page).locator(".stats").inner_text()
    assert last_answer(page).locator(".notice").is_hidden()
