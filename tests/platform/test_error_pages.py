"""What a browser is shown where there is no page, no permission, or no database."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth import get_user_model
from django.http import HttpResponse
from django.test import Client

from sluice.csp import POLICY


def shown(reply: HttpResponse, status: int) -> str:
    """The heading of a page in the site's look that keeps to its own policy and knows nobody."""
    page = reply.content.decode()
    assert reply.status_code == status and reply["Content-Type"].startswith("text/html")
    assert reply["Content-Security-Policy"] == POLICY
    assert "sluice/css/base.css" in page and "data-theme-toggle" in page and 'href="/"' in page
    assert " style=" not in page and not re.search(r"<script(?! src=)", page) and "csrfmiddlewaretoken" not in page
    found = re.search(r"<h1>([^<]+)</h1>", page)
    assert found, page
    return found[1]


# Nothing here may open the database: whoever asks has a session all the same.
@pytest.fixture
def client() -> Client:
    client = Client(raise_request_exception=False, enforce_csrf_checks=True)
    client.cookies["sessionid"] = "a" * 32
    return client


@pytest.mark.parametrize("path", ["/nosuch", "/chat/999999", "/c/1/", "/<img src=x>"])
def test_no_such_page(client: Client, path: str) -> None:
    reply = client.get(path)
    assert shown(reply, 404) == "There is nothing here"
    assert b"<img src=x>" not in reply.content


def test_form_without_its_token(client: Client) -> None:
    assert shown(client.post("/accounts/login/", {"username": "ada"}), 403) == "Nothing was changed"


def test_page_that_fails(client: Client) -> None:
    """Here the page asks for the session, and there is no database."""
    assert shown(client.get("/accounts/keys/"), 500) == "Something went wrong on the server"


@pytest.mark.django_db
def test_page_that_needs_a_permission(client: Client) -> None:
    client.force_login(get_user_model().objects.create_user("eve", is_staff=True))
    assert shown(client.get("/admin/inflight/inflightrequest/"), 403) == "You may not open this page"
