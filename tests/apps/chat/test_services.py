"""Turns, branches, what goes into a prompt, and whose a conversation is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from apps.chat import services, turns, writing
from apps.chat.models import Conversation, Message, Preset
from apps.chat.serialise import detail_json
from apps.chat.services import ChatError, Missing
from apps.chat.turns import Turn

pytestmark = pytest.mark.django_db

State = Message.State


@pytest.fixture
def user() -> Any:
    return get_user_model().objects.create_user("ada", password="x")


@pytest.fixture
def eve() -> Any:
    return get_user_model().objects.create_user("eve", password="x")


def start(user: Any, op: str = "send", ref: str = "", **body: Any) -> Turn:
    start.count += 1  # type: ignore[attr-defined]
    return turns.start_turn(user, op, body, ref or f"ref-{start.count}", "m")  # type: ignore[attr-defined]


start.count = 0  # type: ignore[attr-defined]


def end(turn: Turn, text: str = "ok", state: str = State.COMPLETE, reason: str = "stop") -> Message:
    writing.begin_request(turn.answer.id, "r")
    assert writing.finish(turn.answer.id, "r", text=text, state=state, reason=reason)
    turn.answer.refresh_from_db()
    return turn.answer


def follow_up(user: Any, before: Turn, text: str = "more") -> Turn:
    return start(user, conversation=before.conversation.id, parent=before.answer.id, text=text)


def test_a_first_send_makes_conversation_title_and_answer(user: Any) -> None:
    turn = start(user, text="# Hello **there**\nmore", settings={"temperature": 0.5})
    assert turn.conversation.title == "Hello there"
    assert turn.conversation.settings == {"temperature": 0.5}
    assert turn.answer.streaming and turn.conversation.leaf_id == turn.answer.id
    assert turns.prompt_messages(turn) == [{"role": "user", "content": "# Hello **there**\nmore"}]


def test_ui_01_the_same_reference_is_one_send(user: Any) -> None:
    first = start(user, ref="one", text="hi")
    again = start(user, ref="one", text="hi")
    assert again.repeated and again.answer.id == first.answer.id
    assert Message.objects.count() == 2


def test_ui_02_cut_answers_are_not_fed_back_as_finished(user: Any) -> None:
    one = start(user, text="first", settings={"system": "Be brief."})
    end(one, "half of", State.FAILED, "worker_lost")
    two = follow_up(user, one, "second")
    assert turns.prompt_messages(two) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first\n\nsecond"},
    ]
    end(two, "whole")
    three = follow_up(user, two, "third")
    end(three, "at the limit", reason="length")
    four = follow_up(user, three, "fourth")
    assert [m["content"] for m in turns.prompt_messages(four)][2:] == ["whole", "third", "at the limit …", "fourth"]


def test_continue_goes_on_in_the_same_message(user: Any) -> None:
    turn = start(user, text="count")
    end(turn, "one two", State.STOPPED, "user")
    more = start(user, "continue", message=turn.answer.id)
    assert more.continues and more.answer.id == turn.answer.id and more.answer.text == "one two"
    assert turns.prompt_messages(more)[-1] == {"role": "assistant", "content": "one two"}
    end(more, "one two three")
    with pytest.raises(ChatError, match="Only an answer that was cut"):
        start(user, "continue", message=turn.answer.id)


def test_regenerate_and_edit_make_branches(user: Any) -> None:
    turn = start(user, text="a")
    end(turn, "1")
    other = start(user, "regenerate", message=turn.answer.id)
    end(other, "2")
    assert other.answer.parent_id == turn.answer.parent_id
    edited = start(user, "edit", message=turn.user_message.id, text="b")
    end(edited, "3")
    detail = detail_json(edited.conversation)
    assert [m["text"] for m in detail["messages"]] == ["b", "3"]
    assert len(detail["messages"][0]["siblings"]) == 2
    shown = services.update_conversation(user, turn.conversation.id, {"leaf": str(turn.user_message.id)})
    assert [m.text for m in shown.path()] == ["a", "2"]


def test_a_send_does_not_undo_a_name_that_is_given_meanwhile(user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = start(user, text="a")
    end(turn)
    create = Message.objects.create

    def named_meanwhile(**fields: Any) -> Message:
        services.update_conversation(user, turn.conversation.id, {"title": "Another"})
        return create(**fields)

    monkeypatch.setattr(Message.objects, "create", named_meanwhile)
    follow_up(user, turn)
    turn.conversation.refresh_from_db()
    assert turn.conversation.title == "Another"


def test_a_failed_answer_without_text_is_replaced(user: Any) -> None:
    turn = start(user, text="a")
    end(turn, "", State.FAILED, "refused")
    again = start(user, "regenerate", message=turn.answer.id)
    assert again.answer.id == turn.answer.id and not again.continues
    assert Message.objects.count() == 2


def test_nothing_is_sent_under_an_answer_that_is_being_written(user: Any) -> None:
    turn = start(user, text="a")
    for op, body in (
        ("send", {"conversation": turn.conversation.id, "parent": turn.answer.id, "text": "b"}),
        ("regenerate", {"message": turn.answer.id}),
        ("continue", {"message": turn.answer.id}),
    ):
        with pytest.raises(ChatError) as error:
            start(user, op, **body)
        assert error.value.code == "busy"


def test_an_end_is_written_once_and_only_by_its_writer(user: Any) -> None:
    turn = start(user, text="a")
    writing.begin_request(turn.answer.id, "new")
    assert not writing.checkpoint(turn.answer.id, "old", 9, text="stale")
    assert writing.checkpoint(turn.answer.id, "new", 2, text="two")
    assert not writing.checkpoint(turn.answer.id, "new", 1, text="one")
    assert writing.finish(turn.answer.id, "new", state=State.COMPLETE, text="done")
    assert not writing.finish(turn.answer.id, "new", state=State.FAILED, text="lost")
    turn.answer.refresh_from_db()
    assert (turn.answer.text, turn.answer.state) == ("done", State.COMPLETE)


def test_what_is_somebody_elses_does_not_exist(user: Any, eve: Any) -> None:
    turn = start(user, ref="mine", text="secret")
    end(turn)
    for op, body in (
        ("send", {"conversation": turn.conversation.id, "text": "x"}),
        ("edit", {"message": turn.user_message.id, "text": "x"}),
        ("regenerate", {"message": turn.answer.id}),
        ("continue", {"message": turn.answer.id}),
    ):
        with pytest.raises(Missing):
            start(eve, op, **body)
    with pytest.raises(Missing):
        services.update_conversation(eve, turn.conversation.id, {"title": "x"})
    # A reference is the sender's own.
    assert not start(eve, ref="mine", text="other").repeated
    client = Client()
    client.force_login(eve)
    path = f"/chat/conversations/{turn.conversation.id}"
    for response in (
        client.get(path),
        client.delete(path),
        client.patch(path, {"title": "x"}, content_type="application/json"),
        client.get(path + "/export.md"),
        client.get(path + "/export.json"),
        client.get(f"/c/{turn.conversation.id}/"),
    ):
        assert response.status_code == 404
        assert b"secret" not in response.content
    assert Conversation.objects.filter(id=turn.conversation.id).exists()


def test_foreign_parents_are_refused(user: Any) -> None:
    one, two = start(user, text="a"), start(user, text="b")
    end(one)
    with pytest.raises(Missing):
        start(user, conversation=two.conversation.id, parent=one.answer.id, text="c")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 2.1},
        {"temperature": True},
        {"top_p": -0.1},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": "7"},
        {"model": 3},
        {"system": "x" * 20_001},
        {"other": 1},
        [],
        {"temperature": float("nan")},
    ],
)
def test_bad_settings_are_refused(values: Any) -> None:
    with pytest.raises(ChatError):
        services.clean_settings(values)


@pytest.mark.parametrize("text", ["", "  \n", None, 7, "x" * 200_001])
def test_bad_messages_are_refused(user: Any, text: Any) -> None:
    with pytest.raises(ChatError):
        start(user, text=text)
    assert not Conversation.objects.exists()


def test_search_finds_titles_and_texts(user: Any) -> None:
    end(start(user, text="Apples and pears"), "fruit salad")
    end(start(user, text="Stones"), "basalt")
    found = Conversation.objects.for_user(user).matching
    assert [c.title for c in found("SALAD pears")] == ["Apples and pears"]
    assert not found("salad basalt")
    assert found("").count() == 2


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", "New chat"),
        ("```\n\nprint(1)", "print(1)"),
        ("word " * 40, "word word word word word word word word word word word word…"),
        ("[link](x) > quote", "link(x) quote"),
    ],
)
def test_titles(text: str, title: str) -> None:
    assert turns.auto_title(text) == title


def test_json_calls_need_a_user_and_a_token(user: Any) -> None:
    assert Client().get("/chat/conversations").status_code == 401
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    assert client.post("/chat/conversations", {}, content_type="application/json").status_code == 403
    plain = Client()
    plain.force_login(user)
    assert plain.post("/chat/conversations", "[1", content_type="application/json").status_code == 400
    assert plain.get("/chat/conversations?offset=x").status_code == 400


def test_export_says_what_was_cut(user: Any) -> None:
    turn = start(user, text="Stöne <b>")
    end(turn, "half", State.STOPPED, "user")
    client = Client()
    client.force_login(user)
    response = client.get(f"/chat/conversations/{turn.conversation.id}/export.md")
    assert "cut off" in response.content.decode() and "Stöne <b>" in response.content.decode()
    assert client.get(f"/chat/conversations/{turn.conversation.id}/export.exe").status_code == 404


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("What is 2/3?", "what-is-2-3"),
        ("Stöne <b>", "stöne-b"),
        ("Сколько стоит чай", "сколько-стоит-чай"),
        ("今日の天気は？", "今日の天気は"),
        ("नमस्ते दुनिया", "नमस्ते-दुनिया"),
        ("مرحبا \u202e txt.exe", "مرحبا-txt-exe"),
        ("../../etc/passwd", "etc-passwd"),
        ('"; filename=x\\', "filename-x"),
        ("🚀", "chat"),
        ("x" * 120, "x" * 60),
        ("𠮷" * 120, "𠮷" * 60),
    ],
)
def test_an_export_is_named_after_its_title_in_any_script(user: Any, title: str, name: str) -> None:
    turn = start(user, text="x")
    services.update_conversation(user, turn.conversation.id, {"title": title})
    client = Client()
    client.force_login(user)
    for kind in ("md", "json"):
        response = client.get(f"/chat/conversations/{turn.conversation.id}/export.{kind}")
        disposition, file = response["Content-Disposition"].split("; ")
        assert disposition == "attachment"
        expected = f'filename="{name}.{kind}"' if name.isascii() else f"filename*=utf-8''{quote(f'{name}.{kind}')}"
        assert file == expected
        assert len(f"{name}.{kind}".encode()) < 255


@pytest.mark.parametrize(
    ("query", "finds"),
    [
        ("%", "100% sure"),
        ("_", "snake_case"),
        ("'", 'It\'s "quoted"'),
        ('"quoted"', 'It\'s "quoted"'),
        ("\\", "back\\slash"),
        ("🚀", "🚀 (go)"),
        ("🚀 (GO)", "🚀 (go)"),
        ("änderung", "ÄNDERUNG und СКОЛЬКО"),
        ("сколько Und", "ÄNDERUNG und СКОЛЬКО"),
        ("مرحبا", "مرحبا بالعالم"),
        ("sna\x00ke", "snake_case"),
        ("(ä", None),
        ("x" * 1000, None),
        ("ß" * 1000, None),
        ("[", None),
    ],
)
def test_odd_text_is_searched_as_it_is_written(user: Any, query: str, finds: str | None) -> None:
    titles = [
        *("100% sure", "snake_case", 'It\'s "quoted"', "back\\slash", "🚀 (go)"),
        *("ÄNDERUNG und СКОЛЬКО", "مرحبا بالعالم", "plain words"),
    ]
    for title in titles:
        turn = start(user, text="x")
        services.update_conversation(user, turn.conversation.id, {"title": title})
    client = Client()
    client.force_login(user)
    response = client.get("/chat/conversations", {"q": query})
    assert response.status_code == 200
    assert [row["title"] for row in response.json()["conversations"]] == ([finds] if finds else [])


def test_presets_are_bounded_and_ones_own(user: Any, eve: Any) -> None:
    preset = services.save_preset(user, " Brief ", {"system": "Be brief."})
    services.save_preset(user, "Brief", {"temperature": 0})
    assert Preset.objects.get().settings == {"temperature": 0.0}
    with pytest.raises(Missing):
        services.delete_preset(eve, preset.id)
    for n in range(services.PRESETS_PER_USER - 1):
        services.save_preset(user, f"p{n}", {})
    with pytest.raises(ChatError):
        services.save_preset(user, "one too many", {})


def test_no_preset_is_named_as_a_built_in_one(user: Any) -> None:
    source = Path(services.__file__).with_name("static") / "sluice/js/chat/settings.js"
    assert tuple(re.findall(r'{ name: "(\w+)"', source.read_text())) == services.BUILT_IN_PRESETS
    for name in ("Default", " default ", "CREATIVE"):
        with pytest.raises(ChatError, match="built-in"):
            services.save_preset(user, name, {})


def test_the_page_needs_no_inline_script(user: Any) -> None:
    client = Client()
    client.force_login(user)
    page = client.get("/")
    html = page.content.decode()
    assert "style=" not in html and " onclick=" not in html
    assert html.count("<script") == 3  # theme, app, and data that is no script
    assert "script-src 'self'" in page["Content-Security-Policy"]


@pytest.mark.parametrize(
    "body",
    ['{"title": "half \\ud83d"}', '{"settings": {"max_tokens": Infinity}}', '{"settings": {"max_tokens": 1e999}}'],
)
def test_what_no_database_takes_is_refused(user: Any, body: str) -> None:
    turn = start(user, text="hi")
    client = Client()
    client.force_login(user)
    response = client.patch(f"/chat/conversations/{turn.conversation.id}", body, content_type="application/json")
    assert response.status_code == 400, response.content
    assert response.json()["error"]["code"] == "invalid"


def test_the_character_nul_is_left_out(user: Any) -> None:
    """PostgreSQL stores it neither in a text nor in JSON."""
    turn = start(user, text="hi")
    changed = services.update_conversation(
        user, turn.conversation.id, {"title": "a\x00b", "settings": {"system": "x\x00y"}}
    )
    assert (changed.title, changed.settings) == ("ab", {"system": "xy"})
    assert services.save_preset(user, "n\x00", {}).name == "n"
