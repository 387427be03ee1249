"""Who is let in: keys, sessions, tickets, origins, on ASGI scopes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from apps.accounts import keyformat, services
from apps.accounts.auth import authenticate, flush, issue_ticket, origin_allowed, redeem_ticket, renewed
from apps.accounts.keycache import KeyCache, cache
from apps.accounts.models import ApiKey, Ticket, UserLimits
from apps.accounts.principal import Principal
from apps.accounts.quota import Quota

pytestmark = pytest.mark.django_db(transaction=True)

HOST = b"testserver"


@pytest.fixture(autouse=True)
async def quiet_background() -> Any:
    cache.forget()
    yield
    await flush()


def http(method: str = "POST", headers: dict[str, str] | None = None, **extra: Any) -> dict[str, Any]:
    raw = [(b"host", HOST)] + [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
    return {
        "type": "http", "method": method, "path": "/v1/models", "raw_path": b"/v1/models", "scheme": "http",
        "query_string": b"", "headers": raw, "server": ("testserver", 80), "client": ("127.0.0.1", 5000),
        **extra,
    }  # fmt: skip


def socket(headers: dict[str, str] | None = None, **extra: Any) -> dict[str, Any]:
    scope = http("GET", headers, **extra)
    scope.pop("method")
    return {**scope, "type": "websocket", "scheme": "ws", "subprotocols": extra.get("subprotocols", [])}


def make_user(name: str = "ann", **extra: Any) -> Any:
    return get_user_model().objects.create_user(name, password="a good password", **extra)


async def make_key(**options: Any) -> services.CreatedKey:
    return await sync_to_async(services.create_key)(None, **{"name": "test", **options})


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def signed_in(user: Any) -> tuple[str, str]:
    """Cookie header and CSRF token of a browser that has signed in."""
    client = Client()
    client.get(reverse("login"))
    token = client.cookies["csrftoken"].value
    client.force_login(user)
    return f"sessionid={client.cookies['sessionid'].value}; csrftoken={token}", token


async def test_key_names_its_bearer() -> None:
    user = await sync_to_async(make_user)()
    made = await make_key(user=user, allowed_models=["small"])
    principal = await authenticate(http(headers=bearer(made.secret)))
    assert principal is not None
    assert replace(principal, quotas=()) == Principal(
        f"key:{made.key.prefix}", user.pk, False, frozenset({"generate", "read"}), ("small",),
        f"test ({made.key.prefix})", "key",
    )  # fmt: skip
    assert principal.may("generate") and not principal.may("admin")
    assert principal.may_use("small") and not principal.may_use("large")
    assert principal.owns(principal.owner) and not principal.owns("user:99")


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer  "])
async def test_scheme_is_case_insensitive(scheme: str) -> None:
    made = await make_key()
    assert await authenticate(http(headers={"Authorization": f"{scheme} {made.secret}"}))


async def test_wrong_credentials_are_nobody() -> None:
    made = await make_key()
    good = made.secret
    wrong = [
        good[:-1] + ("a" if good[-1] != "a" else "b"),  # right prefix, wrong secret
        keyformat.KEY_START + "zzzzzzzz-" + "a" * 43,  # no such prefix
        good + "a", good[:-1], good.upper(), "", "x" * 100_000, "ü" * 62, made.key.digest,
    ]  # fmt: skip
    for secret in wrong:
        scope = http(headers={"Authorization": "Bearer "})
        scope["headers"][-1] = (b"authorization", b"Bearer " + secret.encode())
        assert await authenticate(scope) is None, secret[:80]
        assert scope["auth_problem"] == "invalid"
    for text in (good, f"Basic {good}", f"Token {good}"):
        assert await authenticate(http(headers={"Authorization": text})) is None
    twice = http(headers=bearer(good))
    twice["headers"].append((b"authorization", f"Bearer {good}".encode()))
    assert await authenticate(twice) is None


async def test_key_in_the_query_string_is_ignored() -> None:
    made = await make_key()
    for name in ("api_key", "key", "token", "authorization", "ticket"):
        scope = http(query_string=f"{name}={made.secret}".encode())
        assert await authenticate(scope) is None
        assert scope["auth_problem"] == "missing"


async def test_wrong_key_beside_a_valid_session_is_refused() -> None:
    user = await sync_to_async(make_user)()
    cookie, token = await sync_to_async(signed_in)(user)
    headers = {"Cookie": cookie, "X-CSRFToken": token}
    assert await authenticate(http(headers=headers)) is not None
    assert await authenticate(http(headers={**headers, "Authorization": "Bearer nonsense"})) is None


async def test_revoked_key_is_refused_at_once_in_this_process() -> None:
    made = await make_key()
    assert await authenticate(http(headers=bearer(made.secret)))
    assert await sync_to_async(services.revoke_key)(None, made.key) is True
    assert await authenticate(http(headers=bearer(made.secret))) is None
    assert await sync_to_async(services.revoke_key)(None, made.key) is False


async def test_key_revoked_elsewhere_is_refused_when_the_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(cache, "_clock", lambda: now[0])
    made = await make_key()
    assert await authenticate(http(headers=bearer(made.secret)))
    await ApiKey.objects.filter(pk=made.key.pk).aupdate(revoked_at=timezone.now())  # another process
    now[0] = 0.9
    assert await authenticate(http(headers=bearer(made.secret)))
    now[0] = 1.0
    assert await authenticate(http(headers=bearer(made.secret))) is None


def test_lookup_that_began_before_a_revocation_does_not_bring_the_key_back() -> None:
    memory = KeyCache()
    principal = Principal("key:x", None, False, frozenset(), None, "x")
    before = memory.generation
    memory.forget()
    memory.put("d", principal, generation=before)
    assert memory.get("d") is None
    memory.put("d", principal, generation=memory.generation)
    assert memory.get("d") is principal


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.accounts.keycache.MAX_ENTRIES", 2)
    memory = KeyCache()
    principal = Principal("key:x", None, False, frozenset(), None, "x")
    for name in "abc":
        memory.put(name, principal, generation=0)
    assert [memory.get(n) is not None for n in "abc"] == [False, True, True]


async def test_expired_key_and_key_of_a_disabled_user_are_refused() -> None:
    made = await make_key(expires_at=timezone.now() + timedelta(hours=1))
    assert await authenticate(http(headers=bearer(made.secret)))
    await ApiKey.objects.filter(pk=made.key.pk).aupdate(expires_at=timezone.now())
    cache.forget()
    assert await authenticate(http(headers=bearer(made.secret))) is None

    user = await sync_to_async(make_user)()
    made = await make_key(user=user)
    user.is_active = False
    await user.asave()
    assert await authenticate(http(headers=bearer(made.secret))) is None


async def test_admin_scope_ends_with_the_users_rights() -> None:
    user = await sync_to_async(make_user)(is_staff=True, is_superuser=True)
    made = await make_key(user=user, scopes=["admin"])
    principal = await authenticate(http(headers=bearer(made.secret)))
    assert principal is not None
    assert principal.is_staff and principal.may("generate") and principal.owns("user:77")
    user.is_superuser = False
    await user.asave()
    cache.forget()
    principal = await authenticate(http(headers=bearer(made.secret)))
    assert principal is not None and not principal.is_staff and not principal.may("admin")


async def test_two_hundred_callers_share_one_lookup(django_assert_max_num_queries: Any) -> None:
    from apps.accounts import auth

    made = await make_key()
    lookups = 0
    real = auth._find_key

    def counted(prefix: str, digest: str) -> Any:
        nonlocal lookups
        lookups += 1
        return real(prefix, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "_find_key", counted)
        found = await asyncio.gather(*(authenticate(http(headers=bearer(made.secret))) for _ in range(200)))
    assert all(found) and lookups == 1


async def test_caller_that_leaves_does_not_cancel_the_lookup_of_others() -> None:
    made = await make_key()
    first = asyncio.create_task(authenticate(http(headers=bearer(made.secret))))
    await asyncio.sleep(0)
    second = asyncio.create_task(authenticate(http(headers=bearer(made.secret))))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is not None


async def test_last_use_is_noted_once_a_minute() -> None:
    made = await make_key()
    await authenticate(http(headers=bearer(made.secret)))
    await flush()
    first = (await ApiKey.objects.aget(pk=made.key.pk)).last_used
    assert first is not None
    cache.forget()
    await authenticate(http(headers=bearer(made.secret)))
    await flush()
    assert (await ApiKey.objects.aget(pk=made.key.pk)).last_used == first
    await ApiKey.objects.filter(pk=made.key.pk).aupdate(last_used=first - timedelta(minutes=2))
    cache.forget()
    await authenticate(http(headers=bearer(made.secret)))
    await flush()
    last = (await ApiKey.objects.aget(pk=made.key.pk)).last_used
    assert last is not None and last >= first


async def test_open_socket_is_told_when_its_caller_is_no_longer_valid() -> None:
    user = await sync_to_async(make_user)()
    made = await make_key(user=user)
    by_key = await authenticate(http(headers=bearer(made.secret)))
    cookie, _ = await sync_to_async(signed_in)(user)
    by_session = await authenticate(http("GET", {"Cookie": cookie}))
    assert by_key is not None and by_session is not None
    assert await renewed(by_key) == by_key and await renewed(by_session) == by_session
    await sync_to_async(services.revoke_key)(None, made.key)
    assert await renewed(by_key) is None
    user.is_active = False
    await user.asave()
    cache.forget()
    assert await renewed(by_session) is None


async def test_new_password_ends_open_sockets_and_tickets_of_the_sessions_before() -> None:
    """Whoever had stolen a session went on generating on a socket, for as long as that stayed open."""
    user = await sync_to_async(make_user)()
    made = await make_key(user=user)
    by_key = await authenticate(http(headers=bearer(made.secret)))
    cookie, _ = await sync_to_async(signed_in)(user)
    before = await authenticate(http("GET", {"Cookie": cookie}))
    assert by_key is not None and before is not None
    ticket = await issue_ticket(before)
    assert await redeem_ticket(await issue_ticket(before)) == before
    user.set_password("another good password")
    await user.asave()
    cookie, _ = await sync_to_async(signed_in)(user)
    after = await authenticate(http("GET", {"Cookie": cookie}))
    # The one with the new password is remembered by now, and must not stand for the one before.
    assert after is not None and await renewed(after) == after
    assert await renewed(before) is None
    assert await redeem_ticket(ticket) is None
    assert await renewed(by_key) == by_key
    assert before.password not in repr(before)


async def test_open_socket_has_the_rights_and_limits_of_now() -> None:
    boss = await sync_to_async(make_user)("boss", is_superuser=True)
    made = await make_key(user=boss, scopes=["generate", "read", "admin"])
    before = await authenticate(http(headers=bearer(made.secret)))
    assert before is not None and before.may("admin")
    boss.is_superuser = False
    await boss.asave()
    await UserLimits.objects.acreate(user=boss, max_tokens_per_request=5)
    cache.forget()
    now = await renewed(before)
    assert now is not None and now.owner == before.owner
    assert not now.may("admin") and now.may("generate")
    assert [quota.max_tokens for quota in now.quotas] == [0, 5]


# --- Sessions ---


async def test_session_reads_without_and_writes_with_the_csrf_token() -> None:
    user = await sync_to_async(make_user)()
    cookie, token = await sync_to_async(signed_in)(user)
    principal = await authenticate(http("GET", {"Cookie": cookie}))
    assert principal is not None
    assert (principal.owner, principal.via, principal.is_staff) == (f"user:{user.pk}", "session", False)

    for headers in (
        {"Cookie": cookie},
        {"Cookie": cookie, "X-CSRFToken": "a" * 32},
        {"Cookie": cookie.split(";")[0], "X-CSRFToken": token},  # no cookie to compare with
        {"Cookie": cookie, "X-CSRFToken": token, "Origin": "http://evil.test"},
        {"Cookie": cookie, "X-CSRFToken": token, "Origin": "null"},
    ):
        for method in ("POST", "PUT", "PATCH", "DELETE", "post", "FOO"):
            scope = http(method, headers)
            assert await authenticate(scope) is None, (method, headers)
            assert scope["auth_problem"] == "csrf"

    for content_type in ("application/json", "multipart/form-data", "application/x-www-form-urlencoded"):
        headers = {"Cookie": cookie, "X-CSRFToken": token, "Content-Type": content_type}
        assert await authenticate(http("POST", headers)) is not None
    headers["Origin"] = "http://testserver"
    assert await authenticate(http("POST", headers)) is not None


async def test_staff_get_no_admin_scope_but_superusers_do() -> None:
    for name, flags, admin in (("staff", {"is_staff": True}, False), ("root", {"is_superuser": True}, True)):
        cookie, _ = await sync_to_async(signed_in)(await sync_to_async(make_user)(name, **flags))
        principal = await authenticate(http("GET", {"Cookie": cookie}))
        assert principal is not None
        assert principal.may("admin") is admin and principal.owns("user:12345") is admin


async def test_no_forged_and_no_stale_session() -> None:
    user = await sync_to_async(make_user)()
    cookie, _ = await sync_to_async(signed_in)(user)
    for bad in ("sessionid=nonsense", "sessionid=", "", "sessionid=" + "a" * 32, "sessionid=\x00"):
        assert await authenticate(http("GET", {"Cookie": bad})) is None
    user.set_password("another good password")
    await user.asave()
    assert await authenticate(http("GET", {"Cookie": cookie})) is None


async def test_disabled_user_has_no_session() -> None:
    user = await sync_to_async(make_user)()
    cookie, _ = await sync_to_async(signed_in)(user)
    user.is_active = False
    await user.asave()
    assert await authenticate(http("GET", {"Cookie": cookie})) is None


# --- WebSockets ---


async def test_session_opens_a_socket_from_this_site_only() -> None:
    user = await sync_to_async(make_user)()
    cookie, _ = await sync_to_async(signed_in)(user)
    assert await authenticate(socket({"Cookie": cookie, "Origin": "http://testserver"})) is not None
    for origin in ({}, {"Origin": "null"}, {"Origin": "http://evil.test"}):
        scope = socket({"Cookie": cookie, **origin})
        assert await authenticate(scope) is None
        assert scope["auth_problem"] == "origin"


async def test_key_opens_a_socket_without_an_origin() -> None:
    made = await make_key()
    assert await authenticate(socket(bearer(made.secret))) is not None
    assert await authenticate(socket({**bearer(made.secret), "Origin": "http://evil.test"})) is None


async def test_ticket_opens_one_socket() -> None:
    made = await make_key(allowed_models=["small"])
    principal = await authenticate(http(headers=bearer(made.secret)))
    assert principal is not None
    token = await issue_ticket(principal)
    scope = socket({"Origin": "http://testserver"}, subprotocols=["sluice.v1", f"sluice.ticket.{token}"])
    assert await authenticate(scope) == principal
    assert await authenticate(scope) is None
    assert scope["auth_problem"] == "invalid"
    token = await issue_ticket(principal)
    query = f"ticket={token}".encode()
    assert await authenticate(socket({"Origin": "http://evil.test"}, query_string=query)) is None
    assert await authenticate(socket({"Origin": "http://testserver"}, query_string=query)) == principal


async def test_ticket_is_redeemed_by_one_of_many() -> None:
    made = await make_key()
    principal = await authenticate(http(headers=bearer(made.secret)))
    assert principal is not None
    token = await issue_ticket(principal)
    found = await asyncio.gather(*(redeem_ticket(token) for _ in range(20)))
    assert [p for p in found if p] == [principal]


async def test_ticket_ends_with_its_time_and_with_its_key() -> None:
    made = await make_key()
    principal = await authenticate(http(headers=bearer(made.secret)))
    assert principal is not None
    token = await issue_ticket(principal)
    await Ticket.objects.aupdate(expires_at=timezone.now())
    assert await redeem_ticket(token) is None
    token = await issue_ticket(principal)
    assert await Ticket.objects.acount() == 1, "issuing clears those that are too old"
    await sync_to_async(services.revoke_key)(None, made.key)
    assert await redeem_ticket(token) is None
    for nonsense in ("", "a" * 43, "ü" * 43, "x" * 100_000):
        assert await redeem_ticket(nonsense) is None


async def test_ticket_of_a_session_ends_with_the_user() -> None:
    user = await sync_to_async(make_user)()
    cookie, _ = await sync_to_async(signed_in)(user)
    principal = await authenticate(http("GET", {"Cookie": cookie}))
    assert principal is not None
    token = await issue_ticket(principal)
    assert await redeem_ticket(token) == principal
    token = await issue_ticket(principal)
    user.is_active = False
    await user.asave()
    assert await redeem_ticket(token) is None


def test_origins(settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["testserver", "sluice.test"]
    settings.CSRF_TRUSTED_ORIGINS = ["https://app.test", "https://*.wild.test"]

    def allowed(*origins: str, host: bytes = HOST, scheme: str = "ws") -> bool:
        scope = {**socket(), "scheme": scheme}
        scope["headers"] = [(b"host", host)] + [(b"origin", o.encode("latin-1")) for o in origins]
        return origin_allowed(scope)

    assert allowed("http://testserver") and allowed("HTTP://TESTSERVER") and allowed("http://testserver:80")
    assert allowed("https://app.test") and allowed("https://a.wild.test")
    assert allowed("http://sluice.test:8000", host=b"sluice.test:8000")
    assert allowed("https://testserver"), "behind a proxy that ends TLS"
    assert allowed("https://testserver", scheme="wss") and not allowed("http://testserver", scheme="wss")
    for bad in (
        "null", "", "testserver", "http://", "file://testserver", "http://testserver.evil.test",
        "http://testserver:8000", "http://app.test", "https://app.test.evil.test", "https://evilwild.test",
        "http://user@testserver@evil.test", "http://testserver:port", "http://\xfc", "http://[::1",
        "chrome-extension://testserver",
    ):  # fmt: skip
        assert not allowed(bad), bad
    assert not allowed("http://testserver", "http://testserver")
    assert not allowed("http://evil.test", host=b"evil.test"), "a host that is not ours is nobody's origin"
    assert not allowed()
    assert origin_allowed(socket(), with_key=True)


async def test_quotas_of_key_and_user() -> None:
    user = await sync_to_async(make_user)()
    made = await make_key(user=user, limits={"tokens_per_minute": 500})
    await UserLimits.objects.acreate(user=user, concurrent_requests=2)
    principal = await authenticate(http(headers=bearer(made.secret)))
    assert principal is not None
    assert principal.quotas == (
        Quota(subject=f"key:{made.key.prefix}", tokens=500),
        Quota(subject=f"user:{user.pk}", concurrent=2),
    )
    cookie, _ = await sync_to_async(signed_in)(user)
    by_session = await authenticate(http("GET", {"Cookie": cookie}))
    assert by_session is not None and by_session.quotas == principal.quotas[1:]


def test_a_session_with_nul_in_its_name_costs_no_query(django_assert_num_queries: Any) -> None:
    # PostgreSQL would not take it, and the caller would be told that the database is away.
    with django_assert_num_queries(0):
        assert async_to_sync(authenticate)(http("GET", {"Cookie": 'sessionid="abcdefgh\\000ijkl"'})) is None
