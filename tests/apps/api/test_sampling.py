"""What a conversation samples with where nobody has chosen: the chat's defaults, not the API's."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import httpx
import pytest
from django.core.management import call_command

from apps.api.sampling import TEMPERATURE, chat_defaults

MODELS = [
    {"id": "plain", "kind": "generate"},
    {"id": "tuned", "kind": "generate", "suggested": {"temperature": 0.6, "top_p": 0.95}},
]


def test_defaults_are_the_makers_or_calm(settings: Any) -> None:
    assert chat_defaults({}) == {"temperature": TEMPERATURE, "top_p": 1.0}
    assert chat_defaults({"top_p": 0.9}) == {"temperature": TEMPERATURE, "top_p": 0.9}
    settings.CHAT_TEMPERATURE = 0.2
    assert chat_defaults({}) == {"temperature": 0.2, "top_p": 1.0}
    assert chat_defaults({"temperature": 0.0}) == {"temperature": 0.0, "top_p": 1.0}


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ([], (TEMPERATURE, 1.0)),
        (["--model", "tuned"], (0.6, 0.95)),
        (["--model", "tuned", "--temperature", "0"], (0.0, 0.95)),
    ],
)
def test_the_terminal_sends_the_defaults(
    arguments: list[str], sent: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": MODELS})
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text="data: [DONE]\n\n")

    lines = iter(["hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=httpx.MockTransport(answer)))
    call_command("chat", "--key", "k", *arguments, stdout=io.StringIO())
    assert [(body["temperature"], body["top_p"]) for body in bodies] == [sent]
