"""A chat user at a limit is told so on the answer itself: what the limit is, and when to try again."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model

from apps.accounts.limits import _in_words
from apps.accounts.models import UserLimits
from apps.chat.models import Message
from sluice import runtime
from tests.apps.chat.sockets import TIMEOUT, open_chat
from tests.core.conftest import Deploy, deploy  # noqa: F401

pytestmark = pytest.mark.usefixtures("configured")


async def answer_of(socket: WebsocketCommunicator, ref: str, **settings: Any) -> dict[str, Any]:
    """Send a message; the answer as the page shows it in the end."""
    await socket.send_json_to(
        {"type": "generate", "id": ref, "op": "send", "text": "hello", "model": "scripted", "settings": settings}
    )
    while True:
        message = await socket.receive_json_from(TIMEOUT)
        assert message["type"] != "error", message
        if message["type"] == "done" and message["id"] == ref:
            return message["message"]


@pytest.fixture
async def ada(transactional_db: Any) -> Any:
    return await sync_to_async(get_user_model().objects.create_user)("ada", password="x")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"requests_per_minute": 1}, "This user is limited to 1 requests per minute. Try again in "),
        ({"tokens_per_day": 60}, "This user is limited to 60 tokens per day. Try again in "),
    ],
)
async def test_refusal_says_what_and_when(deploy: Deploy, ada: Any, limits: dict[str, int], said: str) -> None:
    """The first answer is whole; the second is refused, costs the workers nothing, and the socket stays open."""
    gateway, _ = await deploy().both()
    await sync_to_async(UserLimits.objects.create)(user=ada, **limits)
    with runtime.replaced(gateway):
        socket = await open_chat(ada)
        first = await answer_of(socket, "one", max_tokens=20)
        assert (first["state"], first["error"]) == (Message.State.COMPLETE, "")
        second = await answer_of(socket, "two", max_tokens=20)
        assert second["state"] == Message.State.FAILED
        assert second["code"] == "rate_limit_exceeded" and second["reason"] == "refused"
        assert second["error"].startswith(said), second["error"]
        assert second["error"].endswith(("seconds.", "second.", "minutes.", "hours."))
        stored = await Message.objects.aget(id=second["id"])
        assert stored.error == second["error"], "after a reload it says the same"
        assert sum((await gateway.outcomes()).values()) == 1
        await socket.disconnect(timeout=TIMEOUT)


async def test_a_message_that_can_never_fit_says_so(deploy: Deploy, ada: Any) -> None:
    gateway, _ = await deploy().both()
    await sync_to_async(UserLimits.objects.create)(user=ada, max_tokens_per_request=5)
    with runtime.replaced(gateway):
        socket = await open_chat(ada)
        answer = await answer_of(socket, "one", max_tokens=20)
        assert answer["error"] == (
            "This user is limited to 5 answer tokens per request. The request asks for more than that at once."
        )
        await socket.disconnect(timeout=TIMEOUT)


async def test_an_answer_whose_length_is_left_open_keeps_within_the_limit(deploy: Deploy, ada: Any) -> None:
    """It was refused, as asking for all that the context holds."""
    gateway, _ = await deploy().both()
    await sync_to_async(UserLimits.objects.create)(user=ada, max_tokens_per_request=5)
    with runtime.replaced(gateway):
        socket = await open_chat(ada)
        answer = await answer_of(socket, "one")
        assert (answer["state"], answer["error"]) == (Message.State.COMPLETE, "")
        assert answer["stats"]["generated_tokens"] <= 5
        await socket.disconnect(timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.01, "1 second"), (1.2, "2 seconds"), (89, "89 seconds"), (100, "2 minutes"), (5000, "84 minutes"),
     (5401, "2 hours"), (86400, "24 hours")],
)  # fmt: skip
def test_times_are_never_shorter_than_they_are(seconds: float, words: str) -> None:
    assert _in_words(seconds) == words


async def test_a_message_that_fails_unforeseen_is_answered(
    deploy: Deploy,
    ada: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a conversation is deleted just as it is written to, for one. Unanswered, it is sent for ever."""

    def gone(*args: Any) -> Any:
        raise Message.DoesNotExist

    gateway, _ = await deploy().both()
    with runtime.replaced(gateway):
        socket = await open_chat(ada)
        monkeypatch.setattr("apps.chat.turns.start_turn", gone)
        await socket.send_json_to({"type": "generate", "id": "one", "op": "send", "text": "hello"})
        answer = await socket.receive_json_from(TIMEOUT)
        assert (answer["type"], answer["id"], answer["error"]["code"]) == ("error", "one", "internal")
        await socket.disconnect(timeout=TIMEOUT)
