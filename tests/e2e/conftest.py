"""A browser, a site, and a signed-in page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import skip_or_fail
from tests.e2e.site import Cut, Site

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One site for all tests that leave its processes alone."""
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        yield site.start()
    finally:
        site.close()


@pytest.fixture
def cut(site: Site) -> Iterator[Cut]:
    """The network between a browser and the site."""
    cut = Cut(site.port)
    yield cut
    cut.close()


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Sites whose processes a test may kill."""
    sites: list[Site] = []

    def make(**options: Any) -> Site:
        folder = tmp_path / f"site{len(sites)}"
        folder.mkdir()
        site = Site(folder, **options)
        sites.append(site)
        return site.start()

    yield make
    for site in sites:
        site.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium. One per module: while it runs, no asyncio test could."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = CHROMIUM if Path(CHROMIUM).exists() else shutil.which("chromium")
    if path is None:
        skip_or_fail("chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def contexts(browser: Any) -> Iterator[Callable[..., Any]]:
    """Signed-in browser contexts; page errors fail the test."""
    opened: list[Any] = []
    errors: list[str] = []

    def make(site: Site, user: str = "ada", url: str | None = None, **options: Any) -> Any:
        options = {"viewport": {"width": 1280, "height": 800}, **options}
        context = browser.new_context(base_url=url or site.url, **options)
        context.set_default_timeout(15_000)
        cookies = [{**cookie, "url": url or site.url} for cookie in site.cookies(user)]
        context.add_cookies(cookies)
        context.on("weberror", lambda error: errors.append(str(error.error)))
        opened.append(context)
        return context

    yield make
    for context in opened:
        context.close()
    assert not errors, f"errors in the page: {errors}"


@pytest.fixture
def page(contexts: Callable[..., Any], site: Site) -> Any:
    """The chat page of a user, ready to write in."""
    return open_chat(contexts(site))


def open_chat(context: Any, path: str = "/", prepare: Callable[[Any], object] | None = None) -> Any:
    """``prepare`` is done to the page before it goes anywhere."""
    page = context.new_page()
    if prepare is not None:
        prepare(page)
    page.goto(path)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_function("() => document.querySelector('#model').value !== ''")
    return page
