"""The reference JavaScript client on the public socket, in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.chat import counted
from tests.e2e.conftest import open_chat
from tests.e2e.site import MODEL, Cut, Site

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


@pytest.fixture
def cut(site: Site) -> Iterator[Cut]:
    cut = Cut(site.port)
    yield cut
    cut.close()


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
