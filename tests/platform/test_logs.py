"""Log lines: one object each, the level of an ending, request ids, and no text."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from inference import endings, logs
from inference.messages import Ending
from sluice.conf import ServerConfig
from sluice.logs import RequestIdFilter, clean_request_id


def ending(state: str, reason: str, **fields: Any) -> Ending:
    values = {
        "id": "r1", "model": "m", "endpoint": "chat", "transport": "sse", "owner": "key:ab", "server": "s1",
        "worker": "w1", "attempts": 1, "prompt_tokens": 5, "generated_tokens": 7, "created_ms": 1000,
        "claimed_ms": 1010, "first_token_ms": 1050, "ended_ms": 2000, **fields,
    }  # fmt: skip
    return Ending(state=state, reason=reason, **values)


@pytest.fixture
def lines() -> Any:
    """Lines of the JSON handler, as objects."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonFormatter())
    handler.addFilter(RequestIdFilter())
    logger = logging.getLogger("sluice.request")
    logger.addHandler(handler)
    level, logger.level = logger.level, logging.DEBUG
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.level = level


def test_an_ending_is_one_line_of_figures(lines) -> None:  # type: ignore[no-untyped-def]
    endings.log_ending(ending("finished", "stop"), exchange="req-1")
    (line,) = lines()
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info", "logger": "sluice.request", "event": "request_ended", "id": "r1", "request_id": "req-1",
        "message": "request r1 ended: finished(stop), 5 + 7 tokens in 1.00 s",
        "endpoint": "chat", "transport": "sse", "model": "m", "outcome": "finished", "reason": "stop",
        "owner": "key:ab", "worker": "w1", "attempts": 1, "prompt_tokens": 5, "generated_tokens": 7,
        "queue_ms": 10, "ttft_ms": 50, "duration_ms": 1000,
    }  # fmt: skip


def test_what_never_happened_is_left_out(lines) -> None:  # type: ignore[no-untyped-def]
    endings.log_ending(ending("cancelled", "client_gone", claimed_ms=0, first_token_ms=0, worker=""))
    (line,) = lines()
    assert not line.keys() & {"queue_ms", "ttft_ms", "worker"}
    assert line["request_id"] == "-"


@pytest.mark.parametrize(
    ("state", "reason", "level"),
    [
        ("finished", "length", "INFO"),
        ("cancelled", "client_gone", "INFO"),
        ("cancelled", "user", "INFO"),
        ("cancelled", "deadline", "WARNING"),
        ("cancelled", "shutdown", "WARNING"),
        ("failed", "worker_lost", "ERROR"),
        ("failed", "engine_error", "ERROR"),
    ],
)
def test_level_by_outcome(state: str, reason: str, level: str) -> None:
    assert logging.getLevelName(endings.level_of(ending(state, reason))) == level


def test_an_exception_stays_in_its_line(lines) -> None:  # type: ignore[no-untyped-def]
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("sluice.request").exception("it\nbroke")
    (line,) = lines()
    assert line["message"] == "it\nbroke"
    assert "ValueError" in line["exception"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [(b"abc-1.2:3_x", True), (b"", False), (b"a b", False), (b"a\nb", False), (b"x" * 65, False), (b"\xff", False)],
)
def test_request_ids_of_clients(given: bytes, kept: bool) -> None:
    assert (clean_request_id(given) == given.decode("latin-1")) is kept


@pytest.fixture
def printed() -> Iterator[io.StringIO]:
    """What the handler of the settings prints."""
    (handler,) = [h for h in logging.getLogger().handlers if type(h) is logging.StreamHandler]
    stream = handler.setStream(out := io.StringIO())
    yield out
    handler.setStream(stream)  # type: ignore[arg-type]


@pytest.fixture
def debugging() -> Iterator[None]:
    """As with ``SLUICE_LOG_LEVEL=DEBUG``."""
    loggers = [logging.getLogger(), logging.getLogger("django")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.django_db
@pytest.mark.usefixtures("debugging")
def test_a_new_key_is_in_no_line_of_any_level(printed: io.StringIO) -> None:
    """Django tells of each name that a template does not find, with all that the template was given."""
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    with CaptureQueriesContext(connection):  # statements are logged as well then, with what they hold
        reply = client.post("/admin/accounts/apikey/add/", {"name": "secret name", "scopes": ["generate"]})
    found = re.search(r"sk-sluice-[a-z0-9]{8}-\w+", reply.content.decode())
    assert reply.status_code == 200 and found
    assert found[0] not in printed.getvalue()
    assert "secret name" not in printed.getvalue()


@pytest.mark.parametrize(
    ("request_of_a_stranger", "said"),
    [
        ({"path": "/accounts/login/", "headers": {"host": "evil.example"}}, "Invalid HTTP_HOST header: 'evil.example'"),
        ({"path": "/accounts/login/", "query_params": {f"q{i}": 1 for i in range(1001)}}, "parameters exceeded"),
    ],
)
def test_a_refused_request_is_one_warning(
    request_of_a_stranger: dict[str, Any], said: str, printed: io.StringIO
) -> None:
    assert Client().get(**request_of_a_stranger).status_code == 400
    (line,) = printed.getvalue().splitlines()
    assert " WARNING " in line
    assert said in line


def test_log_format_is_a_setting() -> None:
    assert ServerConfig.from_env({"SLUICE_LOG_FORMAT": "json"}).log_format == "json"
    with pytest.raises(Exception, match="SLUICE_LOG_FORMAT must be one of text, json"):
        ServerConfig.from_env({"SLUICE_LOG_FORMAT": "xml"})
