"""The chat page where things cross: refused sends, late replies, deleted conversations, fast fingers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.chat import answer_text, ask, counted, last_answer, say, wait_done, wait_text
from tests.e2e.conftest import open_chat
from tests.e2e.site import Site
from tests.e2e.wire import Wire, eventually
from tests.support import eventually_sync

pytestmark = [pytest.mark.browser, pytest.mark.slow]


class Refusing:
    """The page's socket, on which ``generate`` is refused before anything is stored, as by a server that restarts."""

    def __init__(self, context: Any) -> None:
        self.on = False
        self.socket: Any = None
        self.sockets = 0
        context.route_web_socket("**/ws/chat", self._opened)

    def _opened(self, socket: Any) -> None:
        self.socket = socket
        self.sockets += 1
        server = socket.connect_to_server()
        socket.on_message(lambda text: self._sent(server, text))

    def _sent(self, server: Any, text: str) -> None:
        message = json.loads(text)
        if self.on and message["type"] == "generate":
            error = {"message": "This server is restarting.", "code": "shutting_down"}
            self.socket.send(json.dumps({"type": "error", "id": message["id"], "error": error}))
        else:
            server.send(text)


def answered_and_refusing(context: Any) -> tuple[Any, Refusing]:
    """A page with one answer, and its socket, which takes no more."""
    refusing = Refusing(context)
    page = open_chat(context)
    say(page, "One.", "First")
    wait_done(page)
    refusing.on = True
    return page, refusing


def retry(page: Any) -> Any:
    return last_answer(page).locator("[data-act=retry]")


def ended(site: Site) -> int:
    return sum(site.outcomes().values())


def test_try_again_takes_the_place_of_an_answer_without_text(page: Any, site: Site) -> None:
    """No second copy of the question, with arrows between the two."""
    ask(page, "Break [[error@0]]")
    wait_done(page)
    before = ended(site)
    retry(page).click()
    eventually_sync(lambda: ended(site) == before + 1, 10, what="it was tried again")
    wait_done(page)
    assert page.locator(".message").count() == 2
    assert page.locator(".message .branches:visible").count() == 0


def test_try_again_after_an_edit_that_failed(page: Any, site: Site) -> None:
    say(page, "One.", "Old")
    wait_done(page)
    page.focus("#input")
    page.keyboard.press("ArrowUp")
    page.locator(".editor textarea").fill("New [[error@0]]")
    page.locator(".editor textarea").press("Enter")
    wait_done(page)
    before = ended(site)
    retry(page).click()
    eventually_sync(lambda: ended(site) == before + 1, 10, what="it was tried again")


@pytest.mark.parametrize("op", ["send", "edit", "regenerate"])
def test_a_refused_turn_stays_and_can_be_sent_again(contexts: Callable[..., Any], site: Site, op: str) -> None:
    """Also once the page has connected again, and looks at what the server has."""
    page, refusing = answered_and_refusing(contexts(site))
    if op == "send":
        ask(page, "Second [[say:Two.]]")
    elif op == "edit":
        page.locator(".message.user [data-act=edit]").click()
        page.locator(".editor textarea").fill("Second [[say:Two.]]")
        page.locator(".editor textarea").press("Enter")
    else:
        last_answer(page).locator("[data-act=regenerate]").click()
    page.wait_for_selector(".answer.failed [data-act=retry]")
    messages = page.locator(".message").count()
    refusing.socket.close()
    eventually(page, lambda: refusing.sockets == 2)
    page.wait_for_timeout(500)  # for what must not be looked at: there is no event where nothing is
    assert page.locator(".message").count() == messages
    assert retry(page).is_visible()
    refusing.on = False
    retry(page).click()
    wait_text(page, "One." if op == "regenerate" else "Two.")
    wait_done(page)
    assert page.locator(".message").count() == messages


@pytest.mark.parametrize("op", ["send", "regenerate"])
def test_after_a_refused_turn_another_message_can_be_sent(contexts: Callable[..., Any], site: Site, op: str) -> None:
    page, refusing = answered_and_refusing(contexts(site))
    if op == "send":
        ask(page, "Second")
    else:
        last_answer(page).locator("[data-act=regenerate]").click()
    page.wait_for_selector(".answer.failed")
    refusing.on = False
    say(page, "Three.", "Third")
    wait_text(page, "Three.")
    wait_done(page)
    assert page.locator(".message").count() == 4
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".message").count() == 4


def test_a_refused_message_can_be_changed_and_sent(contexts: Callable[..., Any], site: Site) -> None:
    context = contexts(site)
    refusing = Refusing(context)
    page = open_chat(context)
    refusing.on = True
    ask(page, "Frist")
    page.wait_for_selector(".answer.failed")
    refusing.on = False
    page.focus("#input")
    page.keyboard.press("ArrowUp")
    page.locator(".editor textarea").fill("First [[say:One.]]")
    page.locator(".editor textarea").press("Enter")
    wait_text(page, "One.")
    wait_done(page)
    assert page.locator(".message").count() == 2


def test_enter_in_the_search_opens_what_was_searched_for(contexts: Callable[..., Any], site: Site) -> None:
    """However fast: not the first of the list as it was before."""
    site.add_user("fast")
    page = open_chat(contexts(site, "fast"))
    say(page, "Zebra.", "About animals")
    wait_done(page)
    page.click("#new-chat")
    say(page, "Basalt.", "About stones")
    wait_done(page)
    page.keyboard.press("Control+k")
    page.evaluate(
        """() => { const search = document.querySelector('#search'); search.value = 'zebra';
        search.dispatchEvent(new Event('input', {bubbles: true}));
        search.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, cancelable: true})); }"""
    )
    wait_text(page, "Zebra.")
    # A new name shows at once, too.
    row = page.locator(".row-item", has_text="About animals")
    row.locator(".more").click()
    page.click("#row-menu [data-act=rename]")
    page.fill("#rename-input", "Stripes")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.row-item .name').textContent === 'Stripes'", timeout=3_000)


class Held:
    """Replies to one kind of call that are kept back until a test lets them go."""

    def __init__(self, page: Any, method: str) -> None:
        self.routes: list[Any] = []
        self._page, self._method = page, method
        page.route("**/chat/conversations/*", self._asked)

    def _asked(self, route: Any) -> None:
        if route.request.method == self._method:
            self.routes.append(route)
        else:
            route.continue_()

    def release(self) -> None:
        with self._page.expect_response(lambda r: r.request.method == self._method):
            self.routes.pop().continue_()


@pytest.fixture
def two(contexts: Callable[..., Any], site: Site) -> Any:
    """A page that shows the second of two conversations, whose answer has two versions."""
    page = open_chat(contexts(site))
    say(page, "One.", "Conversation one")
    wait_done(page)
    page.click("#new-chat")
    say(page, "Two.", "Conversation two")
    wait_done(page)
    last_answer(page).locator("[data-act=regenerate]").click()
    page.wait_for_selector(".answer .branches:not([hidden])")
    wait_done(page)
    return page


def to_one(page: Any) -> None:
    page.locator(".row-item", has_text="Conversation one").first.locator("a").click()
    wait_text(page, "One.")


def test_a_late_reply_to_a_change_leaves_the_next_conversation_alone(two: Any) -> None:
    held = Held(two, "PATCH")
    two.select_option("#model", "scripted")
    eventually(two, lambda: held.routes)
    to_one(two)
    held.release()
    say(two, "Three.", "More of one")
    wait_text(two, "Three.")
    wait_done(two)
    assert two.locator(".message").count() == 4
    assert two.locator("#title").inner_text().startswith("Conversation one")


def test_a_branch_that_comes_late_is_not_shown_in_the_next_conversation(two: Any) -> None:
    held = Held(two, "PATCH")
    last_answer(two).locator("[data-act=previous]").click()
    eventually(two, lambda: held.routes)
    to_one(two)
    held.release()
    two.evaluate("() => fetch('/livez').then((reply) => reply.text())")  # by then it has the reply before
    assert answer_text(two) == "One."
    assert two.locator("#title").inner_text().startswith("Conversation one")


def test_a_conversation_that_cannot_be_fetched_leaves_the_address_alone(two: Any) -> None:
    """What is shown and where the next message goes stays what the address says."""
    shown = two.url
    two.route("**/chat/conversations/*", lambda route: route.abort())
    two.locator(".row-item", has_text="Conversation one").first.locator("a").click()
    two.wait_for_selector("#connection:not([hidden])")
    assert two.url == shown
    two.unroute("**/chat/conversations/*")
    to_one(two)
    assert two.url != shown
    assert two.locator("#connection").is_hidden()


def test_deleted_in_another_tab_in_mid_answer(contexts: Callable[..., Any], site: Site) -> None:
    context = contexts(site)
    one = open_chat(context)
    say(one, counted(400), "Soon gone")
    wait_text(one, "beta1")
    wire = Wire()
    two = open_chat(context, one.url, wire.lay)
    wait_text(two, "beta1")
    two.locator(".row-item.current .more").click()
    two.click("#row-menu [data-act=delete]")
    two.click("#confirm [value=ok]")
    site.wait_quiet(2.0)
    one.wait_for_selector("#empty:not([hidden])", timeout=5_000)
    one.wait_for_function("() => !document.querySelector('#list').textContent.includes('Soon gone')", timeout=5_000)
    assert "/c/" not in one.url
    assert "deleted" in one.locator("#connection").inner_text()
    assert "all in order" in site.manage("inflight", "--audit")
    # The tab that has deleted it is not told that something is missing.
    eventually(two, lambda: "error" in wire.passed)
    two.wait_for_timeout(300)  # for what must not be said
    assert two.locator("#announce").inner_text() == "Conversation deleted"


def test_signing_in_again_leads_back_to_the_conversation(contexts: Callable[..., Any], site: Site) -> None:
    context = contexts(site)
    page = open_chat(context)
    say(page, "One.")
    wait_done(page)
    path = page.url.removeprefix(site.url)
    context.clear_cookies(name="sessionid")
    page.fill("#search", "anything")
    page.wait_for_url("**/login/**")
    assert page.url.endswith(f"?next={path}"), page.url


def test_half_a_character_is_no_message_that_hangs(page: Any) -> None:
    page.evaluate(
        """() => { const input = document.querySelector('#input'); input.value = 'Half \\ud83d [[say:ok]]';
        input.dispatchEvent(new Event('input', {bubbles: true})); }"""
    )
    page.press("#input", "Enter")
    wait_done(page, 5_000)
    assert answer_text(page) == "ok"


def sign_out(site: Site, cookies: list[Any]) -> None:
    """End a session, as its page in another tab does."""
    with httpx.Client(base_url=site.url, cookies={c["name"]: c["value"] for c in cookies}, timeout=20) as client:
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', client.get("/accounts/password/").text)
        assert token
        sent = client.post("/accounts/logout/", data={"csrfmiddlewaretoken": token[1]}, headers={"referer": site.url})
        assert sent.status_code in (200, 302), sent.text[:500]


def test_signing_out_elsewhere_ends_the_stream_and_leads_to_the_login(contexts: Callable[..., Any], site: Site) -> None:
    """The answer is stopped as by a closed tab, and what had come is there after signing in again."""
    site.add_user("leaver")
    context = contexts(site, "leaver")
    page = open_chat(context)
    say(page, counted(900), "Long")
    wait_text(page, "beta1")
    page.wait_for_url("**/c/**")
    path = page.url.removeprefix(site.url)
    sign_out(site, site.forget_cookies("leaver"))
    page.wait_for_url("**/login/**", timeout=10_000)
    assert page.url.endswith(f"?next={path}"), page.url
    site.wait_quiet(4.0)
    again = open_chat(contexts(site, "leaver"), path)
    assert "beta1" in answer_text(again)
    assert counted(900).startswith(answer_text(again))
    assert last_answer(again).locator(".notice").is_visible()


class Unwatchable:
    """A page's socket on which an answer cannot be watched, as without the database, while ``on``."""

    def __init__(self, page: Any) -> None:
        self.on = True
        self.refused: list[str] = []
        page.route_web_socket("**/ws/chat", self._opened)

    def _opened(self, socket: Any) -> None:
        server = socket.connect_to_server()

        def sent(raw: str) -> None:
            message = json.loads(raw)
            if self.on and message["type"] in ("attach", "cancel"):
                self.refused.append(message["type"])
                error = {"message": "The database does not answer.", "code": "unavailable"}
                socket.send(json.dumps({"type": "error", "id": message["id"], "error": error}))
            else:
                server.send(raw)

        socket.on_message(sent)


def unwatchable(one: Any) -> tuple[Any, Unwatchable]:
    """Another page of the conversation that ``one`` shows, where its answer cannot be watched."""
    one.wait_for_url("**/c/**")
    other = one.context.new_page()
    refusing = Unwatchable(other)
    other.goto(one.url)
    other.wait_for_function(
        "() => document.querySelector('.answer.live .waiting-text')?.textContent === 'Waiting for the server'"
    )
    return other, refusing


def test_an_answer_that_cannot_be_watched_now_is_asked_for_again(contexts: Callable[..., Any], site: Site) -> None:
    """Redis or the database away as the page attaches: no failure of the answer, which lives."""
    page = open_chat(contexts(site))
    text = counted(200)
    say(page, text)
    wait_text(page, "beta1")
    other, refusing = unwatchable(page)
    assert other.locator(".answer.failed").count() == 0
    refusing.on = False
    wait_text(other, "epsilon4")
    wait_done(other)
    assert answer_text(other) == text


def test_a_stop_while_the_answer_cannot_be_watched_is_not_lost(contexts: Callable[..., Any], site: Site) -> None:
    page = open_chat(contexts(site))
    say(page, counted(900))
    wait_text(page, "beta1")
    other, refusing = unwatchable(page)
    other.click("#stop")
    # Neither heard the first time it is said.
    eventually(other, lambda: "cancel" in refusing.refused)
    assert other.locator("#connection").is_hidden()
    refusing.on = False
    wait_done(other)
    assert "Stopped." in last_answer(other).locator(".notice").inner_text()
    wait_done(page)
    site.wait_quiet(2.0)


class Models:
    """A page's socket on which no model runs at first, and its questions for them, answered by the test."""

    def __init__(self, page: Any) -> None:
        self.asked = self.sockets = 0
        self.socket: Any = None
        self.known: dict[str, Any] = {}
        page.route_web_socket("**/ws/chat", self._opened)

    def _opened(self, socket: Any) -> None:
        self.socket = socket
        self.sockets += 1
        server = socket.connect_to_server()
        server.on_message(self._said)
        socket.on_message(lambda raw: self._asked(server, raw))

    def _said(self, raw: str) -> None:
        message = json.loads(raw)
        if message["type"] == "hello":
            self.known = message
            self.say(type="hello", models=[{**model, "ready": False} for model in message["models"]])
        else:
            self.socket.send(raw)

    def _asked(self, server: Any, raw: str) -> None:
        if json.loads(raw)["type"] == "models":
            self.asked += 1
        else:
            server.send(raw)

    def say(self, **changes: Any) -> None:
        self.socket.send(json.dumps({**self.known, **changes}))


def test_the_page_asks_for_the_models_again_whatever_it_is_told(contexts: Callable[..., Any], site: Site) -> None:
    """Soon while none runs, once a minute otherwise, and also where the answer was an error or none at all."""
    page = contexts(site).new_page()
    page.clock.install()
    models = Models(page)

    def a_minute() -> None:
        for _ in range(6):
            page.clock.run_for(10_000)
            models.socket.send(json.dumps({"type": "pong"}))  # silent for longer, it would be given up
            page.evaluate("() => 0")

    page.goto("/")
    # First, where a narrow picker does not cut it off.
    page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('not running: ')")
    page.clock.run_for(3_100)
    eventually(page, lambda: models.asked == 1)
    error = {"message": "The database does not answer.", "code": "unavailable"}
    models.socket.send(json.dumps({"type": "error", "id": None, "error": error}))
    page.wait_for_function("() => document.querySelector('#connection').textContent.includes('database')")
    a_minute()
    eventually(page, lambda: models.asked == 2)  # this one gets no answer
    a_minute()
    eventually(page, lambda: models.asked == 3)
    models.say(type="models")
    page.wait_for_function("() => !document.querySelector('#model').textContent.includes('not running')")
    assert page.locator("#connection").is_hidden()
    a_minute()
    eventually(page, lambda: models.asked == 4)
    assert models.sockets == 1
