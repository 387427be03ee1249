"""Tabs and devices that show one conversation: each may do anything, and all agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.chat import answer_text, counted, last_answer, say, wait_done, wait_text
from tests.e2e.conftest import open_chat
from tests.e2e.site import Site
from tests.e2e.wire import Wire, eventually
from tests.support import eventually_sync

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG = counted(900)  # about two minutes at the site's pace: every test stops it
QUIET = 10.0

NOTE = """window.seen = [];
new MutationObserver(() => {
  const text = [...document.querySelectorAll('.message.answer .content')].at(-1)?.textContent.trim();
  if (text !== undefined && text !== seen.at(-1)) seen.push(text);
}).observe(document, {subtree: true, childList: true, characterData: true});"""


def noting(page: Any) -> None:
    """For ``open_chat``: every text that the page shows at its end can be asked for."""
    page.add_init_script(NOTE)


def seen(page: Any) -> list[str]:
    return list(page.evaluate("window.seen"))


def shown(page: Any) -> list[list[str]]:
    """Of each message its text, which of its versions it is, and what it says of its end."""
    return list(
        page.eval_on_selector_all(
            ".message",
            """(messages) => messages.map((message) => [
              message.querySelector('.bubble, .content').textContent.trim(),
              message.querySelector('.branches').hidden ? '' : message.querySelector('.count').textContent,
              message.querySelector('.notice:not([hidden]) .notice-text')?.textContent ?? '',
            ])""",
        )
    )


def agree(*pages: Any) -> None:
    """All show the same, and go on to when they are loaded again."""
    eventually_sync(lambda: all(shown(page) == shown(pages[0]) for page in pages), what="the pages agree")
    before = shown(pages[0])
    for page in pages:
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert shown(page) == before


def wait_count(page: Any, kind: str, count: str) -> None:
    """The last message of a kind says which of its versions it is."""
    page.wait_for_function(
        """([kind, count]) => { const last = [...document.querySelectorAll(`.message.${kind} .branches`)].at(-1);
        return last && !last.hidden && last.querySelector('.count').textContent === count; }""",
        arg=[kind, count],
    )


def stop(page: Any) -> None:
    page.click("#stop")
    assert "Stopped." in wait_done(page).locator(".notice").inner_text()


def ended(site: Site) -> int:
    return sum(site.outcomes().values())


def test_who_comes_in_mid_answer_sees_all_of_it_and_may_stop_it(contexts: Callable[..., Any], site: Site) -> None:
    one = open_chat(contexts(site))
    before = ended(site)
    say(one, LONG)
    wait_text(one, "epsilon4")
    one.wait_for_url("**/c/**")
    site.forget_cookies("ada")  # another device has a session of its own
    tab = open_chat(one.context, one.url, noting)
    device = open_chat(contexts(site), one.url, noting)
    for page in (tab, device):
        page.wait_for_function("() => seen.filter((part) => part).length > 2")
    stop(tab)
    for page in (one, device):
        assert "Stopped." in wait_done(page).locator(".notice").inner_text()
        assert answer_text(page) == answer_text(tab)
    for page in (tab, device):
        parts = [part for part in seen(page) if part]
        assert "epsilon4" in parts[0]
        assert all(LONG.startswith(part) for part in parts)
    site.wait_quiet(QUIET)
    text = counted(20)
    say(one, text, "Again")
    for page in (one, tab, device):
        wait_text(page, "upsilon19")
        wait_done(page)
        assert answer_text(page) == text
    eventually_sync(lambda: ended(site) == before + 2, what="each was generated once")
    agree(one, tab, device)


def test_an_edit_while_another_tab_watches_the_branch_before(contexts: Callable[..., Any], site: Site) -> None:
    one = open_chat(contexts(site), prepare=noting)
    say(one, "One.", "First")
    wait_done(one)
    say(one, LONG, "Second")
    wait_text(one, "beta1")
    two = open_chat(one.context, one.url)
    wait_text(two, "beta1")
    new = " ".join(f"new{i}" for i in range(40))
    two.locator(".message.user [data-act=edit]").first.click()
    two.locator(".editor textarea").fill(f"First, changed [[say:{new}]]")
    two.locator(".editor textarea").press("Enter")
    for page in (one, two):
        wait_text(page, "new39")
        wait_done(page)
        assert answer_text(page) == new
        assert [count for _, count, _ in shown(page)] == ["2/2", ""]
    assert all(any(text.startswith(part) for text in ("One.", LONG, new)) for part in seen(one))
    # The branch before has gone on meanwhile, and goes on.
    one.locator(".message.user [data-act=previous]").click()
    wait_text(one, "beta1")
    length = len(answer_text(one))
    one.wait_for_function(
        "length => [...document.querySelectorAll('.answer .content')].at(-1).textContent.length > length", arg=length
    )
    stop(one)
    site.wait_quiet(QUIET)
    assert LONG.startswith(answer_text(one))
    assert [count for _, count, _ in shown(one)] == ["1/2", "", "", ""]
    agree(one, two)


def test_another_answer_while_another_tab_watches_one(contexts: Callable[..., Any], site: Site) -> None:
    """Three versions, two of them being written at once; every page knows of all."""
    one = open_chat(contexts(site))
    say(one, LONG)
    wait_text(one, "beta1")
    stop(one)
    last_answer(one).locator("[data-act=regenerate]").click()
    wait_count(one, "answer", "2/2")
    wait_text(one, "beta1")
    two = open_chat(one.context, one.url)
    last_answer(two).locator("[data-act=previous]").click()
    wait_count(two, "answer", "1/2")
    last_answer(two).locator("[data-act=regenerate]").click()
    for page in (one, two):
        wait_count(page, "answer", "3/3")
    last_answer(one).locator("[data-act=previous]").click()
    wait_count(one, "answer", "2/3")
    stop(one)
    last_answer(one).locator("[data-act=next]").click()
    wait_count(one, "answer", "3/3")
    stop(one)
    wait_done(two)
    site.wait_quiet(QUIET)
    agree(one, two)


def test_sent_by_two_tabs_at_the_same_moment(contexts: Callable[..., Any], site: Site) -> None:
    """Both are kept, as versions, in the order in which the server took them; the later one is shown by both."""
    wires = [Wire(), Wire()]
    one = open_chat(contexts(site), prepare=wires[0].lay)
    say(one, "One.", "First")
    wait_done(one)
    two = open_chat(one.context, one.url, wires[1].lay)
    wires[0].keep = {"generate"}
    wires[1].keep = {"accepted"}
    say(one, LONG, "Mine")
    say(two, LONG, "Yours")
    eventually(two, lambda: wires[1].kept)
    # News of the later one comes before word of the tab's own.
    wires[0].release()
    eventually(two, lambda: "changed" in wires[1].passed)
    wires[1].release()
    for page in (one, two):
        wait_count(page, "user", "2/2")
        assert "Mine" in page.locator(".message.user").last.inner_text()
        wait_text(page, "beta1")
    stop(one)
    wait_done(two)
    one.locator(".message.user [data-act=previous]").last.click()
    wait_count(one, "user", "1/2")
    stop(one)
    site.wait_quiet(QUIET)
    agree(one, two)
    export = one.request.get(one.url.replace("/c/", "/chat/conversations/") + "export.json").json()
    texts = [message["text"].split(" ")[0] for message in export["messages"] if message["role"] == "user"]
    assert texts == ["First", "Yours", "Mine"]
    assert len(export["messages"]) == 6


def test_a_late_look_does_not_hide_what_was_sent_meanwhile(contexts: Callable[..., Any], site: Site) -> None:
    one = open_chat(contexts(site))
    say(one, "One.", "First")
    wait_done(one)
    two = open_chat(one.context, one.url)
    late: list[Any] = []
    one.route("**/chat/conversations/*", lambda route: late.append((route, route.fetch())), times=1)
    say(two, LONG, "Yours")
    eventually(one, lambda: late)
    say(one, "Two.", "Mine")
    wait_text(one, "Two.")
    wait_done(one)
    [(route, reply)] = late
    with one.expect_response("**/chat/conversations/*"):
        route.fulfill(response=reply)
    one.evaluate("() => fetch('/livez').then((reply) => reply.text())")  # by then it has the reply before
    assert answer_text(one) == "Two."
    wait_count(one, "user", "2/2")
    two.locator(".message.user [data-act=previous]").last.click()
    wait_count(two, "user", "1/2")
    stop(two)
    agree(one, two)


def test_continued_by_one_tab_and_answered_anew_by_the_other(contexts: Callable[..., Any], site: Site) -> None:
    """What comes second is refused, and its page shows what the first has begun."""
    one = open_chat(contexts(site))
    say(one, LONG)
    wait_text(one, "beta1")
    stop(one)
    for act in ("regenerate", "continue"):
        wire = Wire("generate")
        two = open_chat(one.context, one.url, wire.lay)
        last_answer(two).locator(f"[data-act={act}]").click()
        eventually(two, lambda wire=wire: wire.kept)
        one.locator("[data-act=continue]").click()
        one.wait_for_selector(".answer.live")
        eventually(two, lambda wire=wire: "changed" in wire.passed)
        wire.release()
        two.wait_for_selector("#connection:not([hidden])")
        two.wait_for_selector(".answer.live")
        assert two.locator(".message").count() == 2
        stop(two)
        wait_done(one)
        agree(one, two)
        two.close()


def rename(page: Any, title: str) -> None:
    page.locator(".row-item.current .more").click()
    page.click("#row-menu [data-act=rename]")
    page.fill("#rename-input", title)
    page.keyboard.press("Enter")


def pin(page: Any) -> None:
    page.locator(".row-item.current .more").click()
    page.click("#row-menu [data-act=pin]")


def system_prompt(page: Any) -> str:
    page.click("#open-settings")
    text = page.input_value("#system")
    page.click("#settings [aria-label=Close]")
    return str(text)


def wait_title(page: Any, title: str) -> None:
    page.wait_for_function(
        """title => document.querySelector('#title').textContent === title
        && document.querySelector('.row-item.current .name').textContent === title""",
        arg=title,
    )


def test_what_one_tab_changes_in_the_list_the_others_show(contexts: Callable[..., Any], site: Site) -> None:
    """Told of it, or by a server that tells nothing of it: as soon as somebody comes back to the page."""
    wire = Wire()
    one = open_chat(contexts(site), prepare=wire.lay)
    say(one, LONG, "Before")
    wait_text(one, "beta1")
    one.wait_for_url("**/c/**")
    two = open_chat(one.context, one.url)
    rename(two, "After")
    wait_title(one, "After")
    pin(two)
    one.wait_for_selector(".row-item.current .pinned:not([hidden])")
    two.click("#open-settings")
    two.fill("#system", "Be brief.")
    two.click("#apply-settings")
    eventually(one, lambda: system_prompt(one) == "Be brief.")
    wire.keep = {"changed"}
    pin(two)
    rename(two, "Later")
    wait_title(two, "Later")
    eventually(one, lambda: len(wire.kept) == 2)
    wait_title(one, "After")
    one.evaluate("() => dispatchEvent(new Event('blur'))")
    one.wait_for_timeout(1_100)  # an absence that counts
    one.evaluate("() => dispatchEvent(new Event('focus'))")
    wait_title(one, "Later")
    one.wait_for_selector(".row-item.current .pinned", state="hidden")
    stop(one)  # what it shows is still the answer that is being written
    wire.release()
    one.fill("#input", "Half a thought")
    two.locator(".row-item.current .more").click()
    two.click("#row-menu [data-act=delete]")
    two.click("#confirm [value=ok]")
    one.wait_for_selector("#empty:not([hidden])")
    assert "deleted" in one.locator("#connection").inner_text()
    assert one.input_value("#input") == "Half a thought"


def test_a_late_list_does_not_undo_what_was_changed_meanwhile(contexts: Callable[..., Any], site: Site) -> None:
    one = open_chat(contexts(site))
    say(one, "One.", "Early")
    wait_done(one)
    two = open_chat(one.context, one.url)
    late: list[Any] = []
    one.route("**/chat/conversations?*", lambda route: late.append((route, route.fetch())), times=1)
    pin(two)
    eventually(one, lambda: late)
    rename(one, "Late")
    wait_title(one, "Late")
    [(route, reply)] = late
    with one.expect_response("**/chat/conversations?*"):
        route.fulfill(response=reply)
    one.wait_for_selector(".row-item.current .pinned:not([hidden])")
    wait_title(one, "Late")


def test_escape_closes_what_is_open_and_only_then_stops(contexts: Callable[..., Any], site: Site) -> None:
    """What was changed elsewhere while an editor was open shows once it is closed."""
    wire = Wire()
    page = open_chat(contexts(site), prepare=wire.lay)
    say(page, LONG, "Escape")
    wait_text(page, "beta1")
    page.wait_for_url("**/c/**")

    def escape(closed: str) -> None:
        page.keyboard.press("Escape")
        page.wait_for_selector(closed, state="hidden")
        assert page.locator("#stop").is_visible()

    row = page.locator(".row-item.current .more")
    page.click("#open-settings")
    escape("#settings")
    row.click()
    escape("#row-menu")
    for act, dialog in (("rename", "#rename"), ("delete", "#confirm")):
        row.click()
        page.click(f"#row-menu [data-act={act}]")
        page.wait_for_selector(f"{dialog}[open]")
        escape(dialog)
    page.click(".account")
    escape("#account-menu")
    page.locator(".message.user [data-act=edit]").click()
    escape(".editor")
    page.locator(".message.user [data-act=edit]").click()
    other = open_chat(page.context, page.url)
    rename(other, "Changed meanwhile")
    eventually(page, lambda: "changed" in wire.passed)
    page.locator(".editor [type=submit]").focus()
    escape(".editor")
    wait_title(page, "Changed meanwhile")
    page.keyboard.press("Escape")
    assert "Stopped." in wait_done(page).locator(".notice").inner_text()
    site.wait_quiet(QUIET)
