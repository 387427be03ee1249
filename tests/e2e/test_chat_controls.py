"""Branches, continuing, keys, the list and the settings of the chat page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chat import answer_text, ask, counted, last_answer, say, wait_done, wait_text
from tests.e2e.conftest import open_chat
from tests.e2e.site import Site
from tests.support import eventually_sync

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_regenerate_keeps_the_branch_before(page: Any) -> None:
    say(page, "Same.")
    wait_done(page)
    last_answer(page).locator("[data-act=regenerate]").click()
    page.wait_for_selector(".answer .branches:not([hidden])")
    wait_done(page)
    assert last_answer(page).locator(".count").inner_text() == "2/2"
    last_answer(page).locator("[data-act=previous]").click()
    page.wait_for_function("() => document.querySelector('.answer .count')?.textContent === '1/2'")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert last_answer(page).locator(".count").inner_text() == "1/2"


def test_arrow_up_edits_and_sends_again_as_a_branch(page: Any) -> None:
    say(page, "One.", "Old")
    wait_done(page)
    page.focus("#input")
    page.keyboard.press("ArrowUp")
    editor = page.locator(".editor textarea")
    assert "Old" in editor.input_value()
    editor.fill("New [[say:Two.]]")
    editor.press("Enter")
    wait_text(page, "Two.")
    wait_done(page)
    assert page.locator(".message.user .count").inner_text() == "2/2"
    page.locator(".message.user [data-act=previous]").click()
    wait_text(page, "One.")
    assert page.locator(".message").count() == 2


def test_a_cut_answer_is_marked_and_can_be_continued(page: Any) -> None:
    page.click("#open-settings")
    page.fill("#max_tokens", "12")
    page.click("#apply-settings")
    text = "abcdefghijklmnopqrstuvwxyz"
    say(page, text)
    answer = wait_done(page)
    assert text.startswith(answer_text(page)) and answer_text(page) != text
    assert "Cut off" in answer.locator(".notice").inner_text()
    cut = answer_text(page)
    answer.locator("[data-act=continue]").click()
    page.wait_for_function(
        "length => document.querySelector('.answer .content').textContent.trim().length > length", arg=len(cut)
    )
    wait_done(page)
    assert answer_text(page).startswith(cut)
    assert page.locator(".message").count() == 2


def test_shift_enter_makes_a_line_and_enter_while_composing_does_nothing(page: Any) -> None:
    page.fill("#input", "one")
    page.press("#input", "Shift+Enter")
    page.type("#input", "two [[say:ok]]")
    # What an input method sends when Enter takes its candidate.
    page.evaluate(
        """() => document.querySelector('#input').dispatchEvent(
             new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"""
    )
    page.evaluate(
        """() => document.querySelector('#input').dispatchEvent(
             new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true, cancelable: true}))"""
    )
    assert page.locator(".message").count() == 0
    page.press("#input", "Enter")
    wait_done(page)
    assert page.locator(".bubble").inner_text() == "one\ntwo [[say:ok]]"


def test_list_search_rename_pin_export_delete(contexts: Callable[..., Any], site: Site, tmp_path: Path) -> None:
    site.add_user("lista")
    context = contexts(site, "lista")
    page = open_chat(context)
    say(page, "Zebra **stripes**.", "About animals")
    wait_done(page)
    page.click("#new-chat")
    say(page, "Basalt.", "About stones")
    wait_done(page)
    assert page.locator(".row-item").count() == 2
    page.keyboard.press("Control+k")
    page.keyboard.type("zebra")
    page.wait_for_function("() => document.querySelectorAll('.row-item').length === 1")
    page.keyboard.press("Enter")
    wait_text(page, "Zebra")
    page.fill("#search", "")
    page.wait_for_function("() => document.querySelectorAll('.row-item').length === 2")
    row = page.locator(".row-item", has_text="About animals")
    row.locator(".more").click()
    page.click("#row-menu [data-act=rename]")
    page.fill("#rename-input", "Animals <b>")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#title').textContent === 'Animals <b>'")
    row = page.locator(".row-item", has_text="Animals")
    row.locator(".more").click()
    page.click("#row-menu [data-act=pin]")
    page.wait_for_selector(".pinned:not([hidden])")
    assert page.locator(".row-item").first.inner_text().startswith("Animals")
    for kind in ("md", "json"):
        row.locator(".more").click()
        with page.expect_download() as download:
            page.click(f"#row-menu [data-act={kind}]")
        path = tmp_path / kind
        download.value.save_as(path)
        assert "Zebra **stripes**." in path.read_text()
        page.keyboard.press("Escape")
    assert json.loads((tmp_path / "json").read_text())["format"] == "sluice-conversation"
    row.locator(".more").click()
    page.click("#row-menu [data-act=delete]")
    page.click("#confirm [value=ok]")
    page.wait_for_function("() => document.querySelectorAll('.row-item').length === 1")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".row-item").count() == 1


def test_deleting_a_conversation_stops_its_answer(page: Any, site: Site) -> None:
    say(page, counted(400))
    wait_text(page, "beta1")
    page.locator(".row-item.current .more").click()
    page.click("#row-menu [data-act=delete]")
    page.click("#confirm [value=ok]")
    site.wait_quiet(2.0)
    page.wait_for_selector("#empty:not([hidden])")


def test_settings_and_presets_hold_per_conversation(page: Any) -> None:
    say(page, "ok")
    wait_done(page)
    page.click("#open-settings")
    shown = [page.get_attribute(f"#{name}", "placeholder") for name in ("temperature", "top_p")]
    assert shown == ["default: 0.7", "default: 1"]
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "3")
    page.click("#apply-settings")
    assert page.locator("#settings-error").is_visible()
    page.fill("#temperature", "0.4")
    page.fill("#preset-name", "Brief")
    page.click("#save-preset")
    page.wait_for_function("() => document.querySelector('#preset').selectedOptions[0].textContent === 'Brief'")
    with page.expect_response(lambda r: r.request.method == "PATCH"):
        page.click("#apply-settings")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.click("#open-settings")
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("#temperature") == "0.4"
    page.click("#settings [aria-label=Close]")
    page.click("#new-chat")
    page.click("#open-settings")
    assert page.input_value("#system") == ""
    page.select_option("#preset", label="Brief")
    assert page.input_value("#system") == "Be brief."
    page.click("#delete-preset")
    page.wait_for_function("() => ![...document.querySelectorAll('#preset option')].some(o => o.text === 'Brief')")


def test_loading_the_page_of_a_new_key_again_makes_no_second_one(contexts: Callable[..., Any], site: Site) -> None:
    site.add_user("keyholder")
    page = contexts(site, "keyholder").new_page()
    page.goto("/accounts/keys/")
    page.fill("[name=name]", "laptop")
    page.click("text=Create key")
    page.wait_for_selector("#secret")
    page.reload()
    page.wait_for_selector("table.keys tbody tr")
    assert page.locator("table.keys tbody tr").count() == 1
    assert page.locator("#secret").count() == 0


def test_going_back_closes_the_settings_of_what_was_left(page: Any) -> None:
    """Left open, they were applied to the other conversation."""
    say(page, "one.", "First")
    wait_done(page)
    page.click("#new-chat")
    say(page, "two.", "Second")
    wait_done(page)
    page.locator(".row-item", has_text="First").first.locator("a").click()
    wait_text(page, "one.")
    page.click("#open-settings")
    page.go_back()
    page.wait_for_selector("#settings", state="hidden")


def test_answers_go_on_while_another_conversation_is_shown(page: Any) -> None:
    text = counted(60)
    say(page, text, "Long one")
    wait_text(page, "beta1")
    page.click("#new-chat")
    say(page, "Short.", "Short one")
    wait_text(page, "Short.")
    page.locator(".row-item", has_text="Long one").first.locator("a").click()
    wait_text(page, "alpha0")
    wait_done(page)
    assert answer_text(page) == text


def focus(page: Any) -> str:
    """What of the page holds the focus."""
    return str(
        page.evaluate(
            """() => { const { id, dataset, classList } = document.activeElement;
            return id || dataset.act || classList[classList.length - 1] || document.activeElement.tagName; }"""
        )
    )


def wait_focus(page: Any, name: str) -> None:
    eventually_sync(lambda: focus(page) == name, what=f"the focus on {name}, not on {focus(page)}")


def test_focus_goes_on_where_a_message_is_changed(page: Any) -> None:
    """Someone without a mouse goes on from there, not from the page's beginning."""
    say(page, "One.", "Old")
    wait_done(page)
    edit = page.locator(".message.user [data-act=edit]")
    for leave in ("Escape", "Tab"):
        edit.press("Enter")
        assert focus(page).startswith("edit-")
        page.keyboard.press(leave)
        if leave == "Tab":
            assert focus(page) == "cancel-edit"
            page.keyboard.press("Enter")
        assert focus(page) == "edit"
    page.press("#input", "ArrowUp")
    page.keyboard.press("Escape")
    assert focus(page) == "input"
    edit.press("Enter")
    page.locator(".editor textarea").fill("New [[say:Two.]]")
    page.locator(".editor textarea").press("Enter")
    wait_text(page, "Two.")
    wait_done(page)
    assert focus(page) == "input"
    page.locator(".message.user [data-act=previous]").press("Enter")
    wait_text(page, "One.")
    wait_focus(page, "next")  # there is none before it
    page.keyboard.press("Enter")
    wait_text(page, "Two.")
    wait_focus(page, "previous")
    last_answer(page).locator("[data-act=regenerate]").press("Enter")
    wait_focus(page, "thread")
    page.wait_for_selector(".answer .branches:not([hidden])")
    wait_done(page)
    # Something else has changed in it: what has the focus keeps it.
    last_answer(page).locator("[data-act=copy]").focus()
    with page.expect_response(lambda r: r.request.method == "GET" and "/chat/conversations/" in r.url):
        other = open_chat(page.context, page.url)
        say(other, "More.", "Another")
        wait_done(other)
    page.wait_for_function("() => document.querySelectorAll('.message').length === 4")
    assert focus(page) == "copy"


def test_focus_returns_to_the_row_whose_menu_was_opened(contexts: Callable[..., Any], site: Site) -> None:
    site.add_user("keys")
    page = open_chat(contexts(site, "keys"))
    for name in ("One", "Two"):
        say(page, f"{name}.", name)
        wait_done(page)
        page.click("#new-chat")
    page.wait_for_function("() => document.querySelectorAll('.row-item').length === 2")

    def choose(name: str, down: int) -> None:
        page.locator(".row-item", has_text=name).locator(".more").press("Enter")
        for _ in range(down):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")

    def on_row(name: str) -> bool:
        return bool(
            page.evaluate(
                "name => document.activeElement.matches('.more')"
                " && document.activeElement.closest('.row-item').textContent.includes(name)",
                name,
            )
        )

    choose("One", 0)
    assert focus(page) == "rename-input"
    page.keyboard.press("Escape")
    eventually_sync(lambda: on_row("One"), what="back at the row")
    choose("One", 0)
    page.fill("#rename-input", "Three")
    page.keyboard.press("Enter")
    eventually_sync(lambda: on_row("Three"), what="back at the renamed row")
    choose("Three", 1)
    page.wait_for_selector(".pinned:not([hidden])")
    eventually_sync(lambda: on_row("Three"), what="back at the pinned row")
    choose("Three", 4)
    page.wait_for_selector("#confirm[open]")
    assert page.evaluate("document.activeElement.textContent") == "Keep"
    page.keyboard.press("Enter")
    eventually_sync(lambda: on_row("Three"), what="back at the row that was kept")
    choose("Three", 4)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.row-item').length === 1")
    wait_focus(page, "list")


def test_ui_04_markup_is_text_and_no_script_runs(page: Any, site: Site) -> None:
    hostile = (
        "<img src=x onerror=window.hacked=1> [a](javascript:window.hacked=1) <svg onload=window.hacked=1>"
        "<script>window.hacked=1</script> ![i](https://example.org/x.png)\n\n```html\n<b onclick=x>"
    )
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    say(page, hostile, "<script>window.hacked=1</script>")
    wait_done(page)
    content = last_answer(page).locator(".content")
    assert "<img src=x onerror" in content.inner_text()
    assert content.locator("img, svg, script, [onclick], [onerror], [onload]").count() == 0
    assert content.locator("a[href^=javascript]").count() == 0
    assert page.evaluate("window.hacked") is None
    assert all(url.startswith((site.url, "data:")) for url in requests)
    policy = page.request.get("/").headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy


def test_another_users_conversation_is_not_there(contexts: Callable[..., Any], site: Site, page: Any) -> None:
    say(page, "secret")
    wait_done(page)
    site.add_user("eve")
    stranger = contexts(site, "eve").new_page()
    assert stranger.goto(page.url).status == 404
    assert "secret" not in stranger.content()


def test_signed_out_elsewhere_leads_to_the_sign_in_page(contexts: Callable[..., Any], site: Site) -> None:
    site.add_user("grace")
    context = contexts(site, "grace")
    page = open_chat(context)
    other = open_chat(context)
    other.click(".account")
    other.click("#logout button")
    other.wait_for_url("**/login/**")
    ask(page, "Hello")
    page.wait_for_url("**/login/**")
