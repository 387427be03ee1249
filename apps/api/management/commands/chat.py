"""``manage.py chat``: talk to a model from a terminal."""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

import httpx
from django.core.management.base import CommandError

from apps.api.sampling import TEMPERATURE, chat_defaults
from apps.api.terminal import Conversation, Terminal, TerminalError, choose_model
from sluice.command import Command as SluiceCommand


class Command(SluiceCommand):
    help = (
        "Talk to a model of a running server, streamed. /reset, /system, /save and /help inside; "
        "Ctrl-C stops the answer, Ctrl-D leaves."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--url",
            default=os.environ.get("SLUICE_URL", "http://127.0.0.1:8000"),
            help="the server (default: SLUICE_URL, or http://127.0.0.1:8000)",
        )
        parser.add_argument("--key", help="an API key (default: SLUICE_API_KEY)")
        parser.add_argument("--model", help="alias of a model (default: the first)")
        parser.add_argument("--system", default="", help="system message")
        parser.add_argument(
            "--temperature", type=_temperature, help=f"default: what the model's makers suggest, else {TEMPERATURE}"
        )
        parser.add_argument("--max-tokens", type=int)

    def handle(self, *args: Any, **options: Any) -> None:
        key = (options["key"] or os.environ.get("SLUICE_API_KEY", "")).strip()
        if not key:
            raise CommandError(
                "Give an API key with --key or SLUICE_API_KEY; 'manage.py apikey create LABEL' makes one."
            )
        if not key.isascii() or not key.isprintable():
            raise CommandError("That is no API key: it has characters that none has.")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a stray byte must not end the conversation
        try:
            import readline  # noqa: F401 - line editing and history where the platform has them
        except ImportError:
            pass
        extra = {"temperature": options["temperature"], "max_tokens": options["max_tokens"]}
        chosen = {name: value for name, value in extra.items() if value is not None}
        timeout = httpx.Timeout(10.0, read=60.0)  # pings come every few seconds
        headers = {"Authorization": f"Bearer {key}"}
        try:
            with httpx.Client(
                base_url=options["url"].rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout
            ) as client:
                model = choose_model(client, options["model"])
                chosen = {**chat_defaults(model.get("suggested", {})), **chosen}
                conversation = Conversation(client, model["id"], options["system"], **chosen)
                Terminal(conversation, input, self.stdout._out).run()
        except httpx.InvalidURL as exc:
            raise CommandError(f"{options['url']!r} is no address of a server: {exc}.") from exc
        except TerminalError as exc:
            raise CommandError(str(exc)) from exc


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:  # not a number is in no range
        raise ArgumentTypeError("it is a number from 0 to 2")
    return value
