"""A conversation in a terminal, over the public API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx

HELP = """\
/reset          forget the conversation
/system TEXT    set the system message (and forget the conversation); without text: show it
/save FILE      write the conversation to a file, as JSON
/help           this
/quit           leave (as does Ctrl-D)
Ctrl-C          stop the answer; at the prompt: clear the line"""


class TerminalError(Exception):
    """Something the user can mend; the message says how."""


class Conversation:
    """Messages so far, and the one way to add to them.

    Args:
        client: knows the server's address and the key.
        options: further fields of the request (``temperature``, ``max_tokens``).
    """

    def __init__(self, client: httpx.Client, model: str, system: str = "", **options: Any) -> None:
        self.client = client
        self.model = model
        self.options = options
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Iterator[str]:
        """Send a message and give the answer's text as it comes.

        When the caller stops early, closing the connection cancels the answer and
        what has arrived is kept. A turn that failed is forgotten: half an answer
        is not fed back as a whole one.

        Raises:
            TerminalError: refused, failed, or the server went away.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        failed = False
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        except TerminalError:
            failed = True
            raise
        finally:
            if pieces and not failed:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.options}
        try:
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as exc:  # NaN, or what was no text in the terminal's encoding
            raise TerminalError(f"That can not be sent: {exc}.") from exc
        kind = {"Content-Type": "application/json"}
        try:
            with self.client.stream("POST", "/v1/chat/completions", content=content, headers=kind) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise TerminalError(_message(reply))
                done = False
                for line in _lines(reply):
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        done = True
                        break
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise TerminalError(event["error"]["message"])
                    for choice in event["choices"]:
                        if text := choice["delta"].get("content"):
                            yield text
                if not done:
                    raise TerminalError("The answer broke off: the server closed the connection.")
        except httpx.HTTPError as exc:
            raise TerminalError(f"No answer from {self.client.base_url}: {exc}") from exc

    def save(self, name: str) -> Path:
        """Write the conversation to a file.

        Raises:
            TerminalError: the file can not be written.
        """
        content = {"model": self.model, "messages": self.messages}
        try:
            path = Path(name).expanduser()
            path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as exc:  # also: a name or text that is none, a user without a home
            raise TerminalError(f"Not saved: {exc}") from exc
        return path


def choose_model(client: httpx.Client, wanted: str | None = None) -> dict[str, Any]:
    """The model asked for, or the first that this key may use: its entry in ``/v1/models``.

    Raises:
        TerminalError: the server is away, the key is wrong, or there is no such model; then it lists those there are.
    """
    try:
        reply = client.get("/v1/models")
    except httpx.HTTPError as exc:
        raise TerminalError(
            f"No answer from {client.base_url}: {exc}. Is the server running? (SLUICE_URL or --url say where.)"
        ) from exc
    if reply.status_code != 200:
        raise TerminalError(_message(reply))
    models = {str(model["id"]): model for model in reply.json()["data"] if model.get("kind") != "embed"}
    if not models:
        raise TerminalError("This key may use no model that answers.")
    if wanted is not None and wanted not in models:
        raise TerminalError(f"There is no model {wanted!r} for this key. There are: {', '.join(models)}.")
    return dict(models[wanted or next(iter(models))])


def _lines(reply: httpx.Response) -> Iterator[str]:
    """The lines of an event stream; httpx would also break them at U+2028 and others, which an answer may hold."""
    rest = b""
    for piece in reply.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {reply.status_code}."


class Terminal:
    """Reads lines, runs commands, prints answers.

    Args:
        read: gives a line, raises EOFError at the end and KeyboardInterrupt on Ctrl-C.
    """

    def __init__(self, conversation: Conversation, read: Any, out: TextIO) -> None:
        self.conversation = conversation
        self.read = read
        self.out = out

    def run(self) -> None:
        """Until the end of input or /quit."""
        self.say(f"{self.conversation.model} - /help for help")
        while True:
            try:
                line = self.read("> ").strip()
            except EOFError:
                self.say("")
                return
            except KeyboardInterrupt:
                self.say("")
                continue
            if line == "/quit":
                return
            try:
                self.handle(line)
            except TerminalError as exc:
                self.say(f"error: {exc}")
            except KeyboardInterrupt:  # once more, while the first one was being heeded
                self.say("")

    def handle(self, line: str) -> None:
        """One line: a command or a message."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if not line:
            return
        if not line.startswith("/"):
            self.answer(line)
        elif command == "/reset":
            self.conversation.reset()
            self.say("(forgotten)")
        elif command == "/system":
            self._system(rest)
        elif command == "/save":
            if not rest:
                raise TerminalError("Name a file: /save FILE")
            self.say(f"(saved to {self.conversation.save(rest)})")
        elif command == "/help":
            self.say(HELP)
        else:
            raise TerminalError(f"There is no command {command}; /help lists them.")

    def answer(self, text: str) -> None:
        """Ask, and print the answer as it comes; Ctrl-C stops it."""
        stream = self.conversation.ask(text)
        try:
            for piece in stream:
                self.out.write(piece)
                self.out.flush()
        except KeyboardInterrupt:
            self.out.write(" (stopped)")
        finally:
            stream.close()  # type: ignore[attr-defined]
            self.say("")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
            self.conversation.reset()
            self.say("(set)")
        else:
            self.say(self.conversation.system or "(none)")

    def say(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()
