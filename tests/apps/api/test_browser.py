"""A browser's own streaming clients, fetch and EventSource, against a live server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.apps.api.live import Site, events
from tests.e2e.conftest import browser
from tests.e2e.site import Cut

__all__ = ["browser"]

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]

USER, PASSWORD = "root", "a password of the tests"

#: Reads a stream with fetch: the text of each event, and when it came; stops after ``most`` events.
FETCH = """async ({path, body, csrf, most}) => {
  const abort = new AbortController();
  const headers = {'Content-Type': 'application/json'};
  if (csrf) headers['X-CSRFToken'] = csrf;
  const reply = await fetch(path, {method: 'POST', headers, body: JSON.stringify(body), signal: abort.signal});
  const out = {status: reply.status, type: reply.headers.get('content-type'), texts: [], last: 0, done: false,
               reads: 0, request: reply.headers.get('x-sluice-request'), error: null};
  if (!out.type.startsWith('text/event-stream')) { out.error = (await reply.json()).error; return out; }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return out;
    out.reads += 1;
    held += value;
    const blocks = held.split('\\n\\n');
    held = blocks.pop();
    for (const block of blocks) {
      for (const line of block.split('\\n')) {
        if (line.startsWith('id: ')) out.last = Number(line.slice(4));
        if (line === 'data: [DONE]') out.done = true;
        else if (line.startsWith('data: ')) {
          const choice = JSON.parse(line.slice(6)).choices[0];
          if (choice && choice.delta.content) out.texts.push(choice.delta.content);
        }
      }
    }
    if (most && out.texts.length >= most) { abort.abort(); return out; }
  }
}"""

#: Reads on with EventSource until [DONE]; counts how often the browser had to connect.
EVENTS = """({path}) => new Promise((resolve, reject) => {
  const out = {text: '', opened: 0, ids: [], usage: null};
  window.heard = out;
  const source = new EventSource(path);
  source.onopen = () => { out.opened += 1; };
  source.onmessage = event => {
    if (event.data === '[DONE]') { source.close(); resolve(out); return; }
    const chunk = JSON.parse(event.data);
    if (chunk.error) { source.close(); reject(new Error(chunk.error.message)); return; }
    if (chunk.usage) out.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (choice && choice.delta.content) { out.text += choice.delta.content; out.ids.push(event.lastEventId); }
  };
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) reject(new Error('refused')); };
})"""


@pytest.fixture(scope="module")
def cookies(site: Site) -> dict[str, str]:
    """The cookies of a signed-in user."""
    with httpx.Client(base_url=site.url, follow_redirects=True, timeout=20) as client:
        page = client.get("/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        assert token, page.text[:500]
        form = {"username": USER, "password": PASSWORD, "csrfmiddlewaretoken": token[1]}
        assert client.post(page.url, data=form, headers={"referer": str(page.url)}).status_code == 200
        return dict(client.cookies)


@pytest.fixture
def open_page(browser: Any, site: Site, cookies: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Pages of the site, signed in (then the page of the own keys) or not (then the one to sign in)."""
    contexts: list[Any] = []

    def make(url: str = "", signed_in: bool = True) -> Any:
        url = url or site.url
        context = browser.new_context(base_url=url)
        contexts.append(context)
        if signed_in:
            context.add_cookies([{"name": name, "value": value, "url": url} for name, value in cookies.items()])
        page = context.new_page()
        page.goto("/accounts/keys/")
        return page

    yield make
    for context in contexts:
        context.close()


def ask(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "slow", "messages": messages, "stream": True, "temperature": 0, "ignore_eos": True, **fields}


def whole(site: Site, request: str) -> str:
    """All of a resumable answer, read by a program."""
    headers = {"Authorization": f"Bearer {site.admin}"}
    reply = httpx.get(f"{site.url}/v1/requests/{request}/events", headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    choices = [choice for data in events(reply.text)[:-1] for choice in json.loads(data)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_fetch_reads_a_stream_piece_by_piece(open_page: Callable[..., Any], cookies: dict[str, str]) -> None:
    page = open_page()
    given = {"path": "/v1/chat/completions", "csrf": cookies["csrftoken"], "most": 0}
    out = page.evaluate(FETCH, {**given, "body": ask("[[say:Hello there, browser.]]", ignore_eos=False, max_tokens=60)})
    assert (out["status"], out["done"]) == (200, True)
    assert "".join(out["texts"]) == "Hello there, browser."
    assert out["reads"] > 10  # made at 20 tokens a second: they did not come in one piece


def test_fetch_needs_the_csrf_token_or_a_key(open_page: Callable[..., Any], site: Site) -> None:
    given = {"path": "/v1/chat/completions", "body": ask("x", max_tokens=2), "csrf": None, "most": 0}
    out = open_page().evaluate(FETCH, given)
    assert (out["status"], out["error"]["code"]) == (403, "csrf_failed")
    out = open_page(signed_in=False).evaluate(FETCH, given)
    assert (out["status"], out["error"]["code"]) == (401, "invalid_api_key")


def test_eventsource_reads_on_where_fetch_stopped(
    open_page: Callable[..., Any], site: Site, cookies: dict[str, str]
) -> None:
    page = open_page()
    given = {"path": "/v1/chat/completions", "csrf": cookies["csrftoken"], "most": 5}
    first = page.evaluate(FETCH, {**given, "body": ask("go on", max_tokens=40, resumable=True)})
    assert first["last"] > 0
    path = f"/v1/requests/{first['request']}/events"
    rest = page.evaluate(EVENTS, {"path": f"{path}?after={first['last']}"})
    assert rest["opened"] == 1
    assert "".join(first["texts"]) + rest["text"] == whole(site, first["request"])
    assert rest["usage"]["completion_tokens"] == 40


def test_eventsource_connects_again_by_itself_and_repeats_nothing(
    open_page: Callable[..., Any], site: Site, cookies: dict[str, str]
) -> None:
    cut = Cut(int(site.url.rpartition(":")[2]))
    try:
        page = open_page(f"http://127.0.0.1:{cut.port}")
        given = {"path": "/v1/chat/completions", "csrf": cookies["csrftoken"], "most": 1}
        first = page.evaluate(FETCH, {**given, "body": ask("go on", max_tokens=60, resumable=True)})
        path = f"/v1/requests/{first['request']}/events"
        page.evaluate(f"args => {{ window.over = ({EVENTS})(args); }}", {"path": path})
        page.wait_for_function("() => window.heard.ids.length > 8")
        cut.down()
        cut.up = True
        heard = page.evaluate("() => window.over")
    finally:
        cut.close()
    assert heard["opened"] == 2
    assert heard["text"] == whole(site, first["request"])
    numbers = [int(number) for number in heard["ids"]]
    assert numbers == sorted(set(numbers))


def test_eventsource_of_a_stranger_is_refused_for_good(
    open_page: Callable[..., Any], site: Site, cookies: dict[str, str]
) -> None:
    given = {"path": "/v1/chat/completions", "csrf": cookies["csrftoken"], "most": 1}
    first = open_page().evaluate(FETCH, {**given, "body": ask("go on", max_tokens=20, resumable=True)})
    path = f"/v1/requests/{first['request']}/events"
    stranger = open_page(signed_in=False)
    with pytest.raises(Exception, match="refused"):
        stranger.evaluate(EVENTS, {"path": path})
