"""The reference JavaScript client on the public socket, in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.chat import counted
from tests.e2e.conftest import open_chat
from tests.e2e.site import MODEL, Cut, Site
from tests.support import eventually_sync

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SETUP = """async ({model, text, resumable}) => {
  const {SluiceClient} = await import('/static/sluice/client/sluice.js');
  window.client = new SluiceClient('/ws/v1/stream');
  window.got = ''; window.events = [];
  window.stream = client.generate({model, resumable, messages: [{role: 'user', content: `[[say:${text}]]`}]});
  window.over = (async () => {
    for await (const event of stream) {
      window.events.push(event.type);
      if (event.type === 'delta') window.got += event.text;
      if (event.type === 'done' || event.type === 'error') window.last = event;
    }
  })();
}"""


def begin(page: Any, text: str, resumable: bool = False) -> None:
    page.evaluate(SETUP, {"model": MODEL, "text": text, "resumable": resumable})


def test_streams_and_cancels(page: Any, site: Site) -> None:
    begin(page, "Hello there.")
    page.evaluate("() => window.over")
    assert page.evaluate("window.got") == "Hello there."
    assert page.evaluate("window.events[0]") == "accepted"
    assert page.evaluate("window.last.finish_reason") == "stop"
    begin(page, counted(300))
    page.wait_for_function("() => window.got.includes('gamma2')")
    page.evaluate("() => { window.stream.cancel(); return window.over; }")
    site.wait_quiet(2.0)


def test_takes_a_stream_up_again_after_a_lost_connection(contexts: Callable[..., Any], site: Site, cut: Cut) -> None:
    page = open_chat(contexts(site, url=f"http://127.0.0.1:{cut.port}"))
    text = counted(80)
    begin(page, text, resumable=True)
    page.wait_for_function("() => window.got.includes('gamma2')")
    cut.down()
    page.wait_for_function("() => window.client.state === 'waiting'")
    cut.up = True
    page.evaluate("() => window.over")
    assert page.evaluate("window.got") == text


MOCKED = """async (options) => {
  const {SluiceClient} = await import('/static/sluice/client/sluice.js');
  window.client = new SluiceClient('/ws/v1/stream', options.ticket ? {
    ticket: () => window.ticket = new Promise(
      (resolve, reject) => setTimeout(() => options.refused ? reject(new Error()) : resolve(''), 200)) } : {});
  window.events = [];
  const note = (event) => window.events.push(event.type);
  for (const text of options.texts) {
    client.generate({model: 'scripted', messages: [{role: 'user', content: text}]},
                    {accepted: note, delta: note, done: note, error: note});
  }
}"""


def test_one_socket_however_much_is_asked_while_a_ticket_is_fetched(page: Any) -> None:
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.evaluate(MOCKED, {"ticket": True, "texts": ["[[say:a]]", "[[say:b]]", "[[say:c]]"]})
    page.wait_for_function("() => window.events.filter(type => type === 'done').length === 3")
    assert [url for url in sockets if url.endswith("/ws/v1/stream")] == sockets[-1:]
    # Closed while it waits for a ticket, it stays closed.
    page.evaluate(MOCKED, {"ticket": True, "texts": ["[[say:a]]"]})
    page.evaluate("() => window.client.close()")
    page.evaluate("() => window.ticket.then(() => new Promise((resolve) => setTimeout(resolve)))")
    assert len(sockets) == 1
    # So it does where the ticket is refused then.
    page.evaluate(MOCKED, {"ticket": True, "refused": True, "texts": ["[[say:a]]"]})
    page.evaluate("() => window.client.close()")
    page.evaluate("() => window.ticket.catch(() => new Promise((resolve) => setTimeout(resolve)))")
    assert page.evaluate("window.client.state") == "closed"


def test_a_stream_is_taken_up_once_however_fast_the_next_socket_is(contexts: Callable[..., Any], site: Site) -> None:
    """A server that leaves lets go of a stream, then closes; the next one is there at once."""
    context = contexts(site)
    heard: list[dict[str, Any]] = []

    def opened(socket: Any) -> None:
        def sent(text: str) -> None:
            message = json.loads(text)
            heard.append(message)
            if message["type"] == "generate":
                socket.send(json.dumps({"type": "accepted", "id": message["id"], "request_id": "r", "model": "m"}))
                error = {"code": "detached", "message": "letting go"}
                socket.send(json.dumps({"type": "error", "id": message["id"], "error": error}))
                socket.close(code=1012)

        socket.on_message(sent)

    context.route_web_socket("**/ws/v1/stream", opened)
    page = open_chat(context)
    page.evaluate(MOCKED, {"texts": ["hello"]})
    eventually_sync(lambda: len(heard) > 1, pause=lambda seconds: page.wait_for_timeout(1000 * seconds))
    # Timers go off in order: one for the first socket's stream would have been before this one.
    page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 400))")
    assert [message["type"] for message in heard] == ["generate", "attach"]


def test_what_is_too_big_for_the_server_fails_and_is_not_sent_again(page: Any) -> None:
    sockets: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.evaluate(MOCKED, {"texts": ["x" * 1_100_000]})
    page.wait_for_function("() => window.events.length")
    assert page.evaluate("window.events") == ["error"]
    # By the answer to another, the first would have been sent again, and its socket closed once more.
    page.evaluate(
        "() => client.generate({model: 'scripted', messages: [{role: 'user', content: '[[say:a]]'}]},"
        "{done: () => window.events.push('done')}) && 0"
    )
    page.wait_for_function("() => window.events.includes('done')")
    assert page.evaluate("window.events") == ["error", "done"]
    assert len(sockets) <= 2


def test_a_cancel_that_a_breaking_connection_swallows_is_said_again(contexts: Callable[..., Any], site: Site) -> None:
    context = contexts(site)
    heard: list[str] = []

    def opened(socket: Any) -> None:
        def sent(text: str) -> None:
            message = json.loads(text)
            heard.append(message["type"])
            if message["type"] == "generate":
                socket.send(json.dumps({"type": "accepted", "id": message["id"], "request_id": "r", "model": "m"}))
            elif heard == ["generate", "cancel"]:
                socket.close(code=1012)
            elif message["type"] == "cancel":
                socket.send(json.dumps({"type": "done", "id": message["id"], "finish_reason": "cancelled"}))

        socket.on_message(sent)

    context.route_web_socket("**/ws/v1/stream", opened)
    page = open_chat(context)
    page.evaluate(MOCKED, {"texts": ["hello"]})
    page.wait_for_function("() => window.events.includes('accepted')")
    page.evaluate("() => [...client.streams.values()][0].cancel()")
    page.wait_for_function("() => window.events.includes('done')")
    assert heard == ["generate", "cancel", "attach", "cancel"]
