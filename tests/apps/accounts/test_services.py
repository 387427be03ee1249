"""Making and revoking keys: permission, admin log, commands, pages, admin."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.exceptions import PermissionDenied, ValidationError
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from apps.accounts import keyformat, services
from apps.accounts.models import ApiKey

pytestmark = pytest.mark.django_db

HOSTILE = "<script>alert(1)</script>\"'&{{ 7*7 }}"


@pytest.fixture
def ann() -> Any:
    return get_user_model().objects.create_user("ann", password="a good password")


@pytest.fixture
def boss() -> Any:
    return get_user_model().objects.create_superuser("boss", password="a good password")


@pytest.fixture
def browser(ann: Any) -> Client:
    client = Client()
    client.force_login(ann)
    return client


@pytest.fixture
def boss_browser(boss: Any) -> Client:
    client = Client()
    client.force_login(boss)
    return client


def test_secret_is_long_and_stored_as_a_hash_only(ann: Any) -> None:
    made = services.create_key(ann, name="x", user=ann)
    assert keyformat.split_key(made.secret) == made.key.prefix
    random_part = made.secret.removeprefix(f"sk-sluice-{made.key.prefix}-")
    assert len(random_part) * 5.954 >= 256  # log2 of 62 symbols
    row = ApiKey.objects.filter(pk=made.key.pk).values().get()
    assert random_part not in str(row)
    assert row["digest"] == keyformat.digest(made.secret)
    assert random_part not in str(LogEntry.objects.values_list())


def test_who_may_create(ann: Any, boss: Any) -> None:
    with pytest.raises(PermissionDenied):
        services.create_key(ann, name="x", user=boss)
    with pytest.raises(PermissionDenied):
        services.create_key(ann, name="x", user=None)
    with pytest.raises(PermissionDenied):
        services.create_key(ann, name="x", user=ann, scopes=["admin"])
    with pytest.raises(PermissionDenied):
        services.create_key(boss, name="x", user=ann, scopes=["admin"])
    services.create_key(boss, name="x", user=ann)
    services.create_key(boss, name="x", user=boss, scopes=["admin"])
    services.create_key(boss, name="x", user=None)
    assert ApiKey.objects.count() == 3
    assert LogEntry.objects.filter(user=boss).count() == 3


@pytest.mark.parametrize(
    "bad",
    [
        {"name": ""}, {"name": " "}, {"name": "x" * 81}, {"scopes": []}, {"scopes": ["root"]},
        {"scopes": ["read", "read"]}, {"allowed_models": [""]},
        {"expires_at": timezone.now() - timedelta(seconds=1)},
    ],
)  # fmt: skip
def test_malformed_keys_are_refused(ann: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        services.create_key(ann, **{"name": "x", "user": ann, **bad})
    assert not ApiKey.objects.exists()


def test_a_user_holds_a_bounded_number_of_keys(ann: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "MAX_KEYS_PER_USER", 2)
    first = services.create_key(ann, name="x", user=ann).key
    services.create_key(ann, name="x", user=ann)
    with pytest.raises(ValidationError, match="revoke one first"):
        services.create_key(ann, name="x", user=ann)
    services.revoke_key(ann, first)
    services.create_key(ann, name="x", user=ann)


def test_who_may_revoke(ann: Any, boss: Any) -> None:
    of_boss = services.create_key(boss, name="x", user=boss).key
    of_nobody = services.create_key(boss, name="x").key
    for key in (of_boss, of_nobody):
        with pytest.raises(PermissionDenied):
            services.revoke_key(ann, key)
        assert key.status == "active"
    assert services.revoke_key(boss, of_nobody)
    assert of_nobody.status == "revoked"
    own = services.create_key(ann, name="x", user=ann).key
    assert services.revoke_key(ann, own)
    assert LogEntry.objects.filter(user=ann, change_message__contains="Revoked API key").count() == 1


def test_first_run_makes_one_admin_and_one_key() -> None:
    out = io.StringIO()
    first = services.ensure_first_run(out)
    assert first is not None
    assert first.password in out.getvalue() and first.key in out.getvalue()
    assert Client().login(username=first.username, password=first.password)
    assert ApiKey.objects.get().user.is_superuser  # type: ignore[union-attr]
    assert services.ensure_first_run(out) is None
    assert get_user_model().objects.count() == 1


def run(*args: str) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    call_command("apikey", *args, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


def test_command_sets_limits() -> None:
    run("create", "ci", "--requests-per-minute", "2", "--tokens-per-day", "0")
    key = ApiKey.objects.get()
    assert (key.requests_per_minute, key.tokens_per_day, key.tokens_per_minute) == (2, 0, None)


def test_command_creates_lists_and_revokes(ann: Any) -> None:
    out, err = run("create", "ci", "--user", "ann", "--scope", "generate", "--model", "small", "--days", "7")
    key = ApiKey.objects.get()
    assert keyformat.split_key(out.strip()) == key.prefix and "not shown again" in err
    assert (key.user, key.scopes, key.allowed_models) == (ann, ["generate"], ["small"])
    assert LogEntry.objects.filter(user=ann, change_message__contains="at the shell").exists()
    listing, _ = run("list")
    assert key.prefix in listing and "active" in listing and out.strip() not in listing
    assert "revoked." in run("revoke", key.prefix)[0]
    assert "before" in run("revoke", out.strip())[0]
    assert key.prefix not in run("list", "--active", "--user", "ann")[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["create", "x", "--user", "nobody"], "no user"),
        (["create", "x", "--user", "ann", "--scope", "admin"], "superuser only"),
        (["create", ""], "cannot be blank"),
        (["create", "x", "--scope", "root"], "invalid choice"),
        (["create", "x", "--days", "-1"], "must be more than 0"),
        (["create", "x", "--days", "nan"], "must be more than 0"),
        (["create", "x", "--tokens-per-minute", "-1"], "must be 0 or more"),
        (["revoke", "zzzzzzzz"], "no key"),
        ([], "required"),
    ],
)
def test_command_says_what_is_wrong(ann: Any, args: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*args)
    assert not ApiKey.objects.exists()


# --- Pages ---


def test_key_page_shows_a_new_key_once(browser: Client, ann: Any) -> None:
    data = {"name": HOSTILE, "scopes": ["generate"], "lifetime": "30", "allowed_models": "small, small,big"}
    page = browser.post(reverse("api_keys"), data)
    assert page.status_code == 201
    key = ApiKey.objects.get()
    assert (key.user, key.name, key.allowed_models) == (ann, HOSTILE, ["small", "big"])
    assert key.expires_at is not None
    secret = page.context["created"].secret
    assert secret in page.content.decode()
    assert "no-store" in page["Cache-Control"]
    again = browser.get(reverse("api_keys")).content.decode()
    assert secret not in again and key.prefix in again
    assert "<script>alert" not in again + page.content.decode()


def test_key_page_offers_the_admin_scope_to_superusers_only(browser: Client, boss_browser: Client) -> None:
    data = {"name": "x", "scopes": ["admin"], "lifetime": ""}
    page = browser.post(reverse("api_keys"), data)
    assert page.status_code == 200 and "Select a valid choice" in page.content.decode()
    assert not ApiKey.objects.exists()
    assert boss_browser.post(reverse("api_keys"), data).status_code == 201


def test_key_page_revokes_own_keys_only(browser: Client, ann: Any, boss: Any) -> None:
    own = services.create_key(ann, name="x", user=ann).key
    other = services.create_key(boss, name="x", user=boss).key
    assert browser.get(reverse("api_key_confirm_revoke", args=[own.prefix])).status_code == 200
    assert browser.get(reverse("api_key_revoke", args=[own.prefix])).status_code == 405
    assert browser.post(reverse("api_key_revoke", args=[other.prefix])).status_code == 404
    assert browser.get(reverse("api_key_confirm_revoke", args=[other.prefix])).status_code == 404
    assert browser.post(reverse("api_key_revoke", args=[own.prefix])).status_code == 302
    own.refresh_from_db()
    other.refresh_from_db()
    assert (own.status, other.status) == ("revoked", "active")


def test_key_pages_need_a_session_and_csrf(ann: Any) -> None:
    for name, args in (("api_keys", []), ("api_key_confirm_revoke", ["x"]), ("password_change", [])):
        page = Client().get(reverse(name, args=args))
        assert page.status_code == 302 and page["Location"].startswith(reverse("login"))
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(ann)
    assert strict.post(reverse("api_keys"), {"name": "x", "scopes": ["generate"]}).status_code == 403
    assert not ApiKey.objects.exists()


def test_sign_in_and_out(ann: Any) -> None:
    client = Client()
    wrong = client.post(reverse("login"), {"username": HOSTILE, "password": "wrong"})
    assert wrong.status_code == 200 and 'role="alert"' in wrong.content.decode()
    assert "<script>alert" not in wrong.content.decode()
    away = {"username": "ann", "password": "a good password", "next": "https://evil.test/"}
    assert "evil" not in client.post(reverse("login"), away)["Location"], "never redirects to another site"
    assert client.get(reverse("api_keys")).status_code == 200
    assert client.get(reverse("logout")).status_code == 405
    assert client.post(reverse("logout"))["Location"] == reverse("login")
    assert client.get(reverse("api_keys")).status_code == 302


def test_password_change(browser: Client) -> None:
    new = "correct horse battery"
    data = {"old_password": "a good password", "new_password1": new, "new_password2": new}
    assert browser.get(reverse("password_change")).status_code == 200
    page = browser.post(reverse("password_change"), data, follow=True)
    assert page.redirect_chain[-1][0] == reverse("password_change_done")
    assert Client().login(username="ann", password=new)


# --- Admin ---


def test_admin_creates_a_key_through_the_service(boss_browser: Client, ann: Any, boss: Any) -> None:
    url = reverse("admin:accounts_apikey_add")
    assert boss_browser.get(url).status_code == 200
    data = {"name": HOSTILE, "user": ann.pk, "scopes": ["generate"], "allowed_models": "a, b"}
    page = boss_browser.post(url, {**data, "concurrent_requests": "3"})
    key = ApiKey.objects.get()
    assert (key.concurrent_requests, key.requests_per_minute) == (3, None)
    assert page.context["created"].secret in page.content.decode()
    assert "no-store" in page["Cache-Control"] and "sk-sluice" not in str(page.cookies)
    assert (key.user, key.scopes, key.allowed_models) == (ann, ["generate"], ["a", "b"])
    assert LogEntry.objects.count() == 1
    for name, args in (("changelist", []), ("change", [key.pk])):
        text = boss_browser.get(reverse(f"admin:accounts_apikey_{name}", args=args)).content.decode()
        assert "<script>alert" not in text and key.digest not in text
    bad = boss_browser.post(url, {**data, "scopes": ["admin"]})
    assert "superuser only" in bad.content.decode() and ApiKey.objects.count() == 1


def test_admin_revokes_after_asking_and_never_deletes(boss_browser: Client, ann: Any) -> None:
    key = services.create_key(ann, name="x", user=ann).key
    url = reverse("admin:accounts_apikey_changelist")
    action = {"action": "revoke_selected", "_selected_action": [key.pk]}
    assert "cannot be undone" in boss_browser.post(url, action).content.decode()
    assert key.status == "active"
    boss_browser.post(url, {**action, "confirmed": "yes"})
    key.refresh_from_db()
    assert key.status == "revoked"
    assert boss_browser.get(reverse("admin:accounts_apikey_delete", args=[key.pk])).status_code == 403
    change = boss_browser.post(reverse("admin:accounts_apikey_change", args=[key.pk]), {"name": "other"})
    assert change.status_code == 302
    key.refresh_from_db()
    assert key.name == "x"


def test_staff_without_the_permission_may_only_look(ann: Any) -> None:
    ann.is_staff = True
    ann.save()
    ann.user_permissions.add(Permission.objects.get(codename="view_apikey"))
    key = services.create_key(None, name="x").key
    client = Client()
    client.force_login(ann)
    url = reverse("admin:accounts_apikey_changelist")
    assert client.get(url).status_code == 200
    client.post(url, {"action": "revoke_selected", "_selected_action": [key.pk], "confirmed": "yes"})
    key.refresh_from_db()
    assert key.status == "active"
    assert client.get(reverse("admin:accounts_apikey_add")).status_code == 403
