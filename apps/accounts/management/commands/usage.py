"""Usage per day, key or user, and model, as CSV."""

from __future__ import annotations

from datetime import date
from typing import Any

from django.core.management.base import CommandParser

from apps.accounts.models import UsageRecord
from apps.accounts.usage import write_csv
from sluice.command import Command as SluiceCommand


class Command(SluiceCommand):
    help = "Write what keys and users have used, per day (UTC) and model, as CSV."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--since", type=date.fromisoformat, metavar="YYYY-MM-DD", help="first day")
        parser.add_argument("--until", type=date.fromisoformat, metavar="YYYY-MM-DD", help="last day")
        parser.add_argument("--owner", help="only this one: key:<prefix> or user:<id>")

    def handle(self, *args: Any, since: date | None, until: date | None, owner: str | None, **options: Any) -> None:
        records = UsageRecord.objects.order_by("day", "owner", "model")
        if since:
            records = records.filter(day__gte=since)
        if until:
            records = records.filter(day__lte=until)
        if owner:
            records = records.filter(owner=owner)
        write_csv(records, self.stdout)
