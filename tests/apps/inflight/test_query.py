"""Filters, order and page from a URL; values shown."""

from __future__ import annotations

import pytest
from django.http import QueryDict
from hypothesis import given
from hypothesis import strategies as st

from apps.inflight.query import PER_PAGE, SORTS, Query
from apps.inflight.rows import COLUMNS, Cell, amount, duration, rate_of, row
from inference.store import RequestView


def view(request_id: str = "r-1", **extra: object) -> RequestView:
    values: dict[str, object] = {
        "id": request_id, "state": "running", "phase": "decode", "model": "m", "endpoint": "chat", "transport": "sse",
        "owner": "user:1", "client": "1.2.3.4", "server": "s-1", "worker": "w-1", "attempt": 1, "priority": "normal",
        "resumable": False, "created_ms": 1000, "claimed_ms": 1200, "first_token_ms": 1500, "last_token_ms": 2500,
        "deadline_ms": 60_000, "prompt_tokens": 5, "max_tokens": 50, "generated_tokens": 11,
    }  # fmt: skip
    return RequestView(**{**values, **extra})  # type: ignore[arg-type]


def parse(text: str) -> Query:
    return Query.parse(QueryDict(text))


def test_query_round_trip() -> None:
    text = "q=abc&phase=queued&model=m&worker=w&server=s&owner=user%3A1&older=60&sort=-generated&page=3"
    query = parse(text)
    assert query == Query("abc", "queued", "m", "w", "s", "user:1", 60, "-generated", 3)
    assert parse(query.encode()) == query
    assert Query().encode() == "" and parse("") == Query()
    assert query.filtered and not query.indexed
    assert parse("sort=-age&page=9").indexed and not parse("sort=model").indexed


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_text_is_a_query(name: str, value: str) -> None:
    names = ["q", "phase", "model", "older", "sort", "page", name]
    query = Query.parse(dict.fromkeys(names, value))
    assert query.sort.removeprefix("-") in SORTS
    assert query.page >= 1 and query.older >= 0
    query.select([view()], 10**6)


@pytest.mark.parametrize("text", ["page=0", "page=-1", "page=x", "page=9999999999999", "page=%D9%A3"])
def test_page_is_in_range(text: str) -> None:
    assert 1 <= parse(text).page <= 10_000


def test_filters() -> None:
    now = 100_000
    assert Query().matches(view(), now)
    for yes, no in (
        ("q=r-1", "q=r-2"), ("phase=decode", "phase=queued"), ("model=m", "model=n"), ("worker=w-1", "worker=w"),
        ("server=s-1", "server=s-2"), ("owner=user:1", "owner=user:11"), ("older=99", "older=100"),
    ):  # fmt: skip
        assert parse(yes).matches(view(), now), yes
        assert not parse(no).matches(view(), now), no
    assert parse("phase=orphaned").matches(view(orphaned=True), now)
    assert not parse("phase=decode").matches(view(orphaned=True), now)


def test_order_is_stable_and_newest_first_among_equals() -> None:
    views = [view(str(i), created_ms=i, generated_tokens=i % 2) for i in range(6)]
    ids = [v.id for v in parse("sort=generated").select(views, 0)]
    assert ids == ["4", "2", "0", "5", "3", "1"]
    assert [v.id for v in parse("sort=-generated").select(views, 0)] == ["5", "3", "1", "4", "2", "0"]
    assert [v.id for v in Query().select(views, 0)] == ["5", "4", "3", "2", "1", "0"], "age ascending: newest first"
    young, old = view("young", last_token_ms=9000, first_token_ms=8000), view("old", last_token_ms=7000)
    waits = view("waits", first_token_ms=0, last_token_ms=0, worker="", deadline_ms=0)
    for sort, wanted in (("last", ["young", "old", "waits"]), ("ttft", ["old", "young", "waits"])):
        assert [v.id for v in parse(f"sort={sort}").select([waits, old, young], 0)] == wanted
        assert [v.id for v in parse(f"sort=-{sort}").select([waits, old, young], 0)] == [*wanted[1::-1], "waits"]
    for sort in ("worker", "deadline"):
        for way in ("", "-"):
            assert [v.id for v in parse(f"sort={way}{sort}").select([waits, old], 0)] == ["old", "waits"]
    claimed, still = view("claimed", claimed_ms=9000), view("still", claimed_ms=0)
    assert [v.id for v in parse("sort=-waited").select([old, claimed, still], 0)] == ["still", "claimed", "old"]
    for sort in SORTS:
        assert len(parse(f"sort={sort}").select([*views, view("q", phase="queued", position=None)], 0)) == 7


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0.00 s"), (420, "0.42 s"), (12_340, "12.3 s"), (245_000, "4 m 05 s"), (7_380_000, "2 h 03 m"),
     (-500, "0.00 s"), (-12_340, "-12.3 s")],
)  # fmt: skip
def test_duration(ms: int, text: str) -> None:
    assert duration(ms) == text


def test_amount() -> None:
    assert [amount(n) for n in (0, 1023, 1536, 3 * 2**30, 2**41)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "2.0 TiB"]


def test_row_has_every_column_and_marks_what_deserves_a_look() -> None:
    cells = row(view(), "ann")
    assert list(cells) == [name for name, _, _ in COLUMNS]
    assert cells["owner"] == Cell("ann", hint="user:1")
    assert (cells["ttft"].text, cells["waited"].text, cells["generated"].text) == ("0.50 s", "0.20 s", "11 / 50")
    assert cells["rate"].text == "10.0" and rate_of(view(generated_tokens=1)) == 0
    assert row(view(orphaned=True), "")["phase"].tone == "bad"
    assert row(view(phase="detached"), "")["client"].text == "gone · 1.2.3.4"
    assert row(view(orphaned=True), "")["client"].text == "unknown · 1.2.3.4"
    assert row(view(client=""), "")["client"].text == "connected"
    blocked = row(view(phase="blocked", blocked_since_ms=3_723_000), "")["phase"]
    assert (blocked.text, blocked.tone) == ("blocked by its client", "warn") and "since 01:02:03 UTC" in blocked.hint
    assert row(view(attempt=2), "")["attempt"].tone == "warn"
    queued = row(view(phase="queued", position=0, claimed_ms=0, first_token_ms=0, last_token_ms=0, worker=""), "")
    assert queued["phase"].text == "queued, place 1"
    assert queued["waited"] == Cell(since=1000) and queued["ttft"].text == "-"
    assert PER_PAGE == 50
