"""Guessing passwords gets nowhere; one's own typing errors do no harm."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse

from apps.accounts import backends
from apps.accounts.backends import MAX_ENTRIES, PER_ADDRESS, PER_NAME, WINDOW, Failures

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def clock(settings: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    settings.AUTHENTICATION_BACKENDS = ["apps.accounts.backends.ThrottledBackend"]
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    now = [1000.0]
    monkeypatch.setattr(backends, "failures", Failures(lambda: now[0]))
    get_user_model().objects.create_superuser("ann", password="right")
    return now


def attempt(password: str, name: str = "ann", address: str = "10.0.0.1", page: str = "login") -> bool:
    client = Client(REMOTE_ADDR=address)
    return client.post(reverse(page), {"username": name, "password": password}).status_code == 302


@pytest.mark.parametrize("page", ["login", "admin:login"])
def test_too_many_wrong_passwords_shut_out_the_right_one_for_a_while(page: str, clock: list[float]) -> None:
    for i in range(PER_NAME):
        assert not attempt(f"wrong {i}", name="Ann" if i % 2 else "ann", page=page)
    assert not attempt("right", page=page)
    assert attempt("right", address="10.0.0.2", page=page), "from elsewhere the user still gets in"
    clock[0] += WINDOW
    assert attempt("right", page=page)


def test_success_forgets_the_failures() -> None:
    for _ in range(3):
        for _ in range(PER_NAME - 1):
            assert not attempt("wrong")
        assert attempt("right")


def test_one_address_may_not_try_all_names() -> None:
    for i in range(PER_ADDRESS):
        attempt("wrong", name=f"user-{i}")
    assert not attempt("right")


def test_memory_is_bounded() -> None:
    failures = Failures()
    for i in range(MAX_ENTRIES + 10):
        failures.add((str(i),))
    assert failures.count(("0",)) == 0 and failures.count((str(MAX_ENTRIES),)) == 1
