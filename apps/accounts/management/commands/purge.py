"""Delete texts, sessions and tickets that are past their time."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandParser

from apps.accounts.retention import purge
from sluice.command import Command as SluiceCommand
from sluice.conf import server_config


class Command(SluiceCommand):
    help = "Delete old conversations, and expired responses, sessions and WebSocket tickets."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than", type=_days, metavar="DAYS",
            help="conversations that nobody has touched for so many days (default: SLUICE_RETENTION_DAYS; 0 keeps all)",
        )  # fmt: skip

    def handle(self, *args: Any, older_than: float | None, **options: Any) -> None:
        days = server_config().retention_days if older_than is None else older_than
        for kind, count in purge(days).items():
            self.stdout.write(f"{count} {kind} deleted")


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1
    if not 0 <= days <= 36_500:
        raise argparse.ArgumentTypeError("must be a number of days from 0 to 36500")
    return days
