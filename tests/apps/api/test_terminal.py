"""``manage.py chat``: commands, streaming, and Ctrl-C that stops the answer and not the program."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from apps.api.terminal import Conversation, Terminal, TerminalError, choose_model
from tests.apps.api.live import Site
from tests.conftest import ROOT

pytestmark = pytest.mark.timeout(180)


def talk(site: Site, lines: list[str], model: str = "demo", **options: Any) -> tuple[str, Conversation]:
    given = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    with httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {site.key}"}, timeout=20) as client:
        conversation = Conversation(client, model, **options)
        Terminal(conversation, read, out).run()
    return out.getvalue(), conversation


def test_a_conversation_with_commands(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = ["[[say:Hello.]]", f"/save {file}", "/system Be kind.", "/system", "[[say:Yes.]]", "/nonsense", "/help"]
    printed, conversation = talk(site, lines, max_tokens=50)
    assert "Hello.\n" in printed
    assert "Be kind." in printed
    assert "There is no command /nonsense" in printed
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]


def test_errors_are_said_and_the_program_goes_on(site: Site) -> None:
    printed, conversation = talk(site, ["[[error@2]]", "x" * 9000, "[[say:ok]]"], max_tokens=20)
    assert printed.count("error: ") == 2
    assert "ok\n" in printed
    assert conversation.messages[-1]["content"] == "ok"
    # Half an answer is not fed back as a whole one: the failed turns are forgotten.
    assert [m["content"] for m in conversation.messages] == ["[[say:ok]]", "ok"]


def test_a_wrong_key_and_a_missing_server_are_named(site: Site) -> None:
    with (
        httpx.Client(base_url=site.url, headers={"Authorization": "Bearer wrong"}) as client,
        pytest.raises(TerminalError, match="API key"),
    ):
        choose_model(client)
    with httpx.Client(base_url="http://127.0.0.1:9") as client, pytest.raises(TerminalError, match="running"):
        choose_model(client)


def test_a_model_that_is_not_there_is_refused_at_the_start(site: Site) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "chat", "--url", site.url, "--model", "nope"],
        cwd=ROOT,
        env={**site.env, "SLUICE_API_KEY": site.key},
        input="hi\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "There is no model 'nope' for this key. There are: demo, slow, one." in done.stderr
    assert "> " not in done.stdout
    with httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {site.demo_only}"}) as client:
        assert choose_model(client)["id"] == choose_model(client, "demo")["id"] == "demo"
        with pytest.raises(TerminalError, match=r"There are: demo\.$"):
            choose_model(client, "slow")


def test_ctrl_c_stops_the_answer_and_not_the_program(site: Site) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "manage.py", "chat", "--url", site.url, "--model", "slow", "--max-tokens", "400"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}", "SLUICE_API_KEY": site.key},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore it, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    seen = b""

    def until(marker: bytes, more: int = 0, seconds: float = 60) -> None:
        """Read until ``marker`` and at least ``more`` bytes after it have come."""
        nonlocal seen
        end = time.monotonic() + seconds
        while marker not in seen or len(seen.partition(marker)[2]) < more:
            ready, _, _ = select.select([ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, seen
            try:
                seen += os.read(ours, 4096)
            except OSError:
                pytest.fail(f"the program has ended: {seen!r}")

    try:
        until(b"> ")
        seen = b""
        os.write(ours, b"tell me a lot\n")
        # What the terminal echoes, what readline says to it, and certainly some of the answer.
        until(b"tell me a lot\r\n", more=50)
        process.send_signal(signal.SIGINT)
        until(b"(stopped)")
        until(b"> ")
        assert process.poll() is None
        os.write(ours, b"/quit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_an_answer_may_hold_what_others_take_for_line_ends(site: Site) -> None:
    text = "a\u2028b\x85c\x0bd"
    printed, conversation = talk(site, [f"[[say:{text}]]"], max_tokens=50)
    assert conversation.messages[-1]["content"] == text
    assert "error" not in printed


def test_what_can_not_be_sent_or_saved_is_said(site: Site) -> None:
    printed, conversation = talk(site, ["half a pair \ud800", "/save \0", "/save ~nobody-here/x", "[[say:ok]]"])
    assert printed.count("error: ") == 3
    assert conversation.messages[-1]["content"] == "ok"


def test_a_second_ctrl_c_does_not_end_the_program_either() -> None:
    class Impatient(Conversation):
        def ask(self, text: str) -> Any:
            try:
                yield "a"
                raise KeyboardInterrupt
            finally:
                raise KeyboardInterrupt

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if text == "a":
                raise KeyboardInterrupt
            return super().write(text)

    lines = iter(["hi", "/system", "/quit"])
    out = Out()
    with httpx.Client() as client:
        Terminal(Impatient(client, "demo"), lambda prompt: next(lines), out).run()
    assert "(none)" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["--url", "http://[::1"], "x", "is no address of a server"),
        ([], "\u043a\u043b\u044e\u0447", "no API key"),
        (["--temperature", "nan"], "", "a number from 0 to 2"),
    ],
)
def test_what_can_not_work_is_said_without_a_traceback(site: Site, arguments: list[str], key: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "chat", "--url", site.url, *arguments],
        cwd=ROOT,
        env={**site.env, "SLUICE_API_KEY": key or f"{site.key}\n"},
        input=b"hi\n\xff\n",
        capture_output=True,
        timeout=60,
    )
    assert said in (done.stdout + done.stderr).decode()
    assert b"Traceback" not in done.stderr
