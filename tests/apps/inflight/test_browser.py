"""The pages in a real Chromium, over the whole system: server, worker, Valkey, database."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.embedded import EmbeddedValkey
from tests.conftest import ROOT, skip_or_fail
from tests.support import eventually_sync, find_free_port

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
LIST = "/admin/inflight/inflightrequest/"


class System:
    """``manage.py up`` with the scripted engine: eight slots, eight tokens a second each."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.port = find_free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "up.log"
        env = {
            **os.environ, "REDIS_URL": redis_url, "SLUICE_VAR_DIR": str(folder), "SLUICE_PORT": str(self.port),
            "SLUICE_MODELS": "scripted=scripted:rate=8,slots=8 fast=scripted:context=100000",
            "SLUICE_MAX_QUEUED": "20000",
        }  # fmt: skip
        env.pop("DATABASE_URL", None)
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up"], cwd=ROOT, env=env, stdout=out, stderr=out
            )
        try:
            eventually_sync(self._ready, 60, what="the system is up")
        except (AssertionError, ChildProcessError):
            self.stop()
            pytest.fail(f"the system did not start:\n{self.log.read_text()[-3000:]}")
        self.password = re.search(r"password\s+(\S+)", self.log.read_text())[1]  # type: ignore[index]
        self.key = re.search(r"sk-sluice-\S+", self.log.read_text())[0]  # type: ignore[index]

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            raise ChildProcessError
        if "sk-sluice-" not in self.log.read_text():
            return False
        return httpx.get(f"{self.url}/readyz").status_code == 200

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def manage(self, script: str) -> None:
        """Run Python in the project, on the system's database."""
        env = {**os.environ, "SLUICE_VAR_DIR": str(self.log.parent)}
        subprocess.run([sys.executable, "manage.py", "shell", "-c", script], cwd=ROOT, env=env, check=True)


class Streams:
    """Clients that stream, in threads; what each of them saw last."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.clients: list[threading.Thread] = []
        self.last: list[str] = []
        self._stop = threading.Event()

    def start(self, count: int) -> None:
        self.clients += [threading.Thread(target=self._stream, daemon=True) for _ in range(count)]
        for client in self.clients[-count:]:
            client.start()

    def _stream(self) -> None:
        body = {"model": "scripted", "prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {self.system.key}"}
        last = ""
        with httpx.stream("POST", f"{self.system.url}/v1/completions", json=body, headers=headers, timeout=60) as r:
            for line in r.iter_lines():
                if self._stop.is_set():
                    break
                last = line if line.startswith("data: {") else last
        self.last.append(last)

    def stop(self) -> None:
        self._stop.set()
        for client in self.clients:
            client.join(30)


@pytest.fixture(scope="module")
def system(valkey: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    import redis

    if not shutil.which(CHROMIUM):
        skip_or_fail("Chromium is not installed: apt-get install chromium")
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    system = System(tmp_path_factory.mktemp("inflight"), valkey.url)
    yield system
    system.stop()
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()


@pytest.fixture(scope="module")
def chromium(system: System) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def streams(system: System) -> Iterator[Streams]:
    clients = Streams(system)
    yield clients
    clients.stop()


@pytest.fixture
def sign_in(chromium: Any, system: System) -> Iterator[Callable[..., Any]]:
    """``sign_in()``: a page of a new browser session; any error in its console fails the test."""
    contexts: list[Any] = []
    errors: list[str] = []

    def note(message: Any) -> None:
        if message.type == "error" and "favicon" not in str(message.location):
            errors.append(f"{message.text} {message.location}")

    def make(user: str = "admin", password: str = "", **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{system.url}/accounts/login/?next=/accounts/keys/")
        page.fill("#id_username", user)
        page.fill("#id_password", password or system.password)
        page.click("main button[type=submit]")
        page.wait_for_url("**/keys/")
        return page

    yield make
    for context in contexts:
        context.close()
    assert not errors


def live(page: Any, url: str) -> Any:
    page.goto(url)
    page.wait_for_selector('[data-state="live"]')
    return page


def ids(page: Any) -> list[str]:
    return page.eval_on_selector_all("[data-rows] tr:not(.ended)", "rows => rows.map(r => r.dataset.id)")


def cell(page: Any, row: str, column: str) -> str:
    return page.inner_text(f'tr[data-id="{row}"] [data-col="{column}"] [data-value]')


def test_rows_come_count_and_go_by_themselves(system: System, sign_in: Any, streams: Streams) -> None:
    page = live(sign_in(), system.url + LIST)
    assert page.is_visible("[data-empty]") and page.is_disabled("[data-needs-matches]")
    streams.start(3)
    eventually_sync(lambda: len(ids(page)) == 3)
    assert not page.is_visible("[data-empty]")
    eventually_sync(lambda: page.is_enabled("[data-needs-matches]"), what="there is something to cancel")
    row = ids(page)[0]
    eventually_sync(lambda: cell(page, row, "phase") == "decode")
    count = int(cell(page, row, "generated").split()[0])
    eventually_sync(lambda: int(cell(page, row, "generated").split()[0]) > count + 5, what="tokens are counted")
    eventually_sync(lambda: 4 < float(cell(page, row, "rate")) < 14, what="tokens/s is what the engine does")
    age = cell(page, row, "age")
    eventually_sync(lambda: cell(page, row, "age") != age)
    streams.stop()
    eventually_sync(lambda: page.inner_text(f'tr[data-id="{row}"] [data-col="phase"]') == "cancelled (client_gone)")
    assert "ended" in page.get_attribute(f'tr[data-id="{row}"]', "class")
    eventually_sync(lambda: page.query_selector("[data-rows] tr") is None, what="ended rows go")
    assert page.inner_text('[data-count="total"]') == "0" and page.is_disabled("[data-needs-matches]")


def test_cancel_while_streaming(system: System, sign_in: Any, streams: Streams) -> None:
    page = live(sign_in(), system.url + LIST)
    watcher = live(sign_in(), system.url + LIST)
    streams.start(2)
    eventually_sync(lambda: len(ids(page)) == 2 and len(ids(watcher)) == 2)
    victim, other = ids(page)
    assert page.is_disabled("[data-needs-selection]")
    page.check(f'tr[data-id="{victim}"] input')
    page.click("text=Cancel selected (1)")
    assert victim in page.inner_text("#content-main") and other not in page.inner_text("#content-main")
    page.fill("#reason", "runaway")
    page.click("text=Yes, cancel")
    page.wait_for_selector(".messagelist >> text=1 cancelled, 0 had ended before.")
    eventually_sync(lambda: cell(watcher, victim, "phase") == "cancelled (admin)", what="the other operator sees it")
    eventually_sync(lambda: len(streams.last) == 1)
    assert "error" in json.loads(streams.last[0][6:]), "the client is told"
    assert ids(page) == [other]
    page.goto(f"{system.url}{LIST}request/{victim}/")
    assert "Ended: cancelled (admin)" in page.inner_text("#content-main")


def test_two_operators_at_once(system: System, sign_in: Any, streams: Streams) -> None:
    """Both have chosen the same request and are asked; the one who comes second is told so, and nothing else ends."""
    first, second = (live(sign_in(), system.url + LIST) for _ in range(2))
    streams.start(3)
    eventually_sync(lambda: len(ids(first)) == 3 and len(ids(second)) == 3)
    shared, other, kept = ids(first)
    first.check(f'tr[data-id="{shared}"] input')
    second.check(f'tr[data-id="{shared}"] input')
    second.check(f'tr[data-id="{other}"] input')
    first.click("text=Cancel selected (1)")
    second.click("text=Cancel selected (2)")
    first.click("text=Yes, cancel")
    first.wait_for_selector(".messagelist >> text=1 cancelled, 0 had ended before.")
    second.click("text=Yes, cancel")
    second.wait_for_selector(".messagelist >> text=1 cancelled, 1 had ended before.")
    eventually_sync(lambda: ids(first) == [kept] and ids(second) == [kept])
    eventually_sync(lambda: len(streams.last) == 2)


def test_slow_client_is_shown(system: System, sign_in: Any) -> None:
    page = live(sign_in(), system.url + LIST)
    body = json.dumps({"model": "fast", "prompt": "x", "max_tokens": 50_000, "ignore_eos": True, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {system.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", system.port))
        client.sendall((head + body).encode())
        eventually_sync(lambda: len(ids(page)) == 1)
        row = ids(page)[0]
        eventually_sync(lambda: cell(page, row, "phase") == "blocked by its client", 30)
        assert cell(page, row, "client").startswith("connected")
        page.goto(f"{system.url}{LIST}?phase=blocked")
        assert ids(page) == [row]
    eventually_sync(lambda: page.query_selector("[data-rows] tr") is None, what="it goes with its client")


def test_one_request_is_live_and_shows_its_ending(system: System, sign_in: Any, streams: Streams) -> None:
    page = live(sign_in(), system.url + LIST)
    streams.start(1)
    eventually_sync(lambda: len(ids(page)) == 1)
    page.click("[data-rows] th a")
    page.wait_for_selector('[data-state="live"]')
    fact = '.inflight-facts [data-col="{}"] [data-value]'.format
    eventually_sync(lambda: int(page.inner_text(fact("generated")).split()[0]) > 3)
    streams.stop()
    eventually_sync(lambda: page.inner_text(fact("phase")) == "cancelled (client_gone)")


def test_nothing_is_fetched_for_a_hidden_tab(system: System, sign_in: Any, streams: Streams) -> None:
    page = live(sign_in(), system.url + LIST)

    hide = "state => {Object.defineProperty(document, 'hidden', {value: state, configurable: true});" \
           "document.dispatchEvent(new Event('visibilitychange'))}"  # fmt: skip
    page.evaluate(hide, True)
    assert page.inner_text("[data-state]") == "paused"
    requests: list[str] = []
    page.on("request", lambda r: requests.append(r.url))
    # Whoever opens the page afterwards has heard of a later request: time enough for the hidden one.
    other = live(sign_in(), system.url + LIST)
    streams.start(1)
    eventually_sync(lambda: len(ids(other)) == 1)
    assert not requests
    page.evaluate(hide, False)
    page.wait_for_selector('[data-state="live"]')
    assert [r for r in requests if "/inflight/live" in r]


def test_hostile_text_does_nothing(system: System, sign_in: Any, valkey: EmbeddedValkey) -> None:
    bad = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    page = live(sign_in(), system.url + LIST)
    submit(valkey, [f"{bad}-1", f"{bad}-2"], owner=bad, endpoint=bad, client=bad)
    eventually_sync(lambda: len(ids(page)) == 2)
    assert cell(page, f"{bad}-1".replace("'", "\\'"), "owner") == bad
    page.click("[data-rows] th a")
    page.wait_for_selector("text=Timeline")
    assert "owned" not in page.title().replace(bad, "")[:5] and page.query_selector("main img") is None
    forget(valkey)


def test_five_thousand_in_flight(system: System, sign_in: Any, streams: Streams, valkey: EmbeddedValkey) -> None:
    streams.start(2)
    page = live(sign_in(), system.url + LIST)
    eventually_sync(lambda: len(ids(page)) == 2)
    submit(valkey, [f"bulk-{i:04d}" for i in range(5000)], owner="user:777")
    eventually_sync(lambda: page.inner_text('[data-count="total"]') == "5002")
    assert len(ids(page)) == 50 and page.inner_text('[data-count="pages"]') == "101"
    page.fill("#f-q", "bulk-49")
    page.click("text=Filter")
    page.wait_for_selector('[data-state="live"]')
    assert page.inner_text('[data-count="matched"]') == "100"
    page.click("text=Show all")
    page.wait_for_selector('[data-state="live"]')
    page.fill("#f-owner", "user:777")
    page.click("text=Filter")
    page.click("text=Cancel all that match")
    page.click("text=Yes, cancel")
    page.wait_for_selector(".messagelist >> text=5000 cancelled, 0 had ended before.", timeout=60_000)
    page.click("text=Show all")
    eventually_sync(lambda: page.inner_text('[data-count="total"]') == "2")
    assert not streams.last, "the streams went on"


def test_refused_without_the_permission(system: System, sign_in: Any) -> None:
    system.manage(
        "from django.contrib.auth.models import User, Permission;"
        "u = User.objects.create_user('viewer', password='view only', is_staff=True);"
        "u.user_permissions.set(Permission.objects.filter(codename='view_inflight'));"
        "User.objects.create_user('plain', password='nothing at all')"
    )
    page = live(sign_in("viewer", "view only"), system.url + LIST)
    assert not page.query_selector("text=Cancel all") and not page.query_selector("[data-rows] input")
    other = sign_in("plain", "nothing at all")
    other.goto(system.url + LIST)
    assert "/login/" in other.url and not other.query_selector("[data-rows]")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(320, "dark"), (360, "light"), (768, "light"), (1440, "dark")])
def test_fits_and_is_accessible(system: System, sign_in: Any, streams: Streams, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    streams.start(9)  # one more than there are slots: queued rows too
    page = sign_in(viewport={"width": width, "height": 800}, color_scheme=scheme)
    live(page, system.url + LIST)
    eventually_sync(lambda: len(ids(page)) == 9)
    pages = [
        LIST,
        f"{LIST}request/{ids(page)[0]}/",
        f"{LIST}workers/",
        f"{LIST}endings/",
        f"{LIST}health/",
        "/accounts/keys/",
        "/accounts/usage/",
    ]
    for path in pages:
        page.goto(system.url + path)
        found = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert found[0] <= found[1], f"{path} scrolls sideways"
        heading = page.eval_on_selector("h1", "e => [e.scrollWidth, e.clientWidth]")
        assert heading[0] <= heading[1], f"{path} has a heading that is cut"
        if path.endswith("workers/") and width <= 900:
            cells = page.eval_on_selector_all(
                ".stacks :is(td, button)", "all => all.map(e => e.getBoundingClientRect().right)"
            )
            assert len(cells) > 30 and max(cells) <= width, "each process is a card with all that is known of it"
        if width in (320, 768):
            continue  # the other two have every colour and both layouts
        # Django's own header and side bar are not ours to judge.
        results = Axe().run(page, context={"include": [["main"]]}, options={"runOnly": ["wcag2a", "wcag2aa"]})
        problems = [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in results.response["violations"]]
        assert not problems, path


def test_keyboard_only(system: System, sign_in: Any, streams: Streams) -> None:
    page = live(sign_in(), system.url + LIST)
    streams.start(1)
    eventually_sync(lambda: len(ids(page)) == 1)
    page.focus("[data-select-all]")
    page.keyboard.press("Space")
    assert page.inner_text("[data-needs-selection]") == "Cancel selected (1)"
    page.focus("[data-needs-selection]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#reason")
    page.focus("#reason")
    page.keyboard.type("by keyboard")
    page.keyboard.press("Enter")
    page.wait_for_selector(".messagelist >> text=1 cancelled")


def submit(valkey: EmbeddedValkey, names: list[str], **extra: Any) -> None:
    """Put requests straight into the store, under a server of their own that is a heartbeat and no more."""
    import asyncio

    from inference.config import Config
    from inference.messages import Job, SamplingParams, ServerBeat, encode
    from inference.redisio import Commander, connect
    from inference.store import RequestStore, Submission

    async def run() -> None:
        config = Config(redis_url=valkey.url, max_queued=20_000)
        redis = Commander(lambda: connect(valkey.url, timeout=5, client_name="test"), name="test")
        redis.start()
        store = RequestStore(redis, config)
        beat = ServerBeat("s-none", "host", 1, "serving", {}, 0, 0, 1, "1")
        await redis.call("SET", store.keys.server_beat("s-none"), encode(beat), "PX", 600_000)
        await redis.call("SADD", store.keys.servers, "s-none")
        values = {"endpoint": "chat", "transport": "sse", "owner": "user:1", **extra}
        jobs = [Job(n, "nobody-serves-this", [1], SamplingParams(max_tokens=5)) for n in names]
        await asyncio.gather(*(store.submit(Submission(j, **values), server="s-none", slots=10**6) for j in jobs))
        await redis.stop()

    # In a thread: Playwright's own loop runs in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(run())).result()


def forget(valkey: EmbeddedValkey) -> None:
    import redis

    with redis.Redis.from_url(valkey.url) as client:
        client.delete("sluice:beat:server:s-none")  # a reaper does the rest
        eventually_sync(lambda: not client.scard("sluice:of:server:s-none"))


def test_links_to_the_neighbouring_pages_come_and_go(system: System, sign_in: Any, valkey: EmbeddedValkey) -> None:
    """The list was opened while it was short."""
    page = live(sign_in(), system.url + LIST)
    assert not page.is_visible("a[rel=next]") and not page.is_visible("a[rel=prev]")
    submit(valkey, [f"many-{i:03d}" for i in range(70)])
    eventually_sync(lambda: page.inner_text('[data-count="pages"]') == "2")
    page.click("a[rel=next]")
    page.wait_for_selector('[data-state="live"]')
    assert len(ids(page)) == 20
    assert page.is_visible("a[rel=prev]") and not page.is_visible("a[rel=next]")
    forget(valkey)
    eventually_sync(lambda: page.inner_text('[data-count="pages"]') == "1")
    assert not page.is_visible("a[rel=prev]")


def test_a_page_that_refreshes_says_what_is_wrong_and_recovers(system: System, sign_in: Any) -> None:
    page = sign_in().context.new_page()  # whose console may complain of the 503
    page.goto(f"{system.url}{LIST}workers/")
    problem = '<div id="content-main"><p role="alert">The store is away.</p></div>'
    page.route("**/workers/", lambda route: route.fulfill(status=503, content_type="text/html", body=problem))
    page.wait_for_selector("text=The store is away.")
    page.unroute("**/workers/")
    page.wait_for_selector("#workers-title")
