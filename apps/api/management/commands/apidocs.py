"""``manage.py apidocs``: write the parameter tables into ``docs/api.md``."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from apps.api.reference import markdown
from sluice.command import Command as SluiceCommand

BEGIN, END = "<!-- parameters: written by manage.py apidocs -->\n", "<!-- end of parameters -->\n"


class Command(SluiceCommand):
    help = "Write the parameter tables, read off the validation types, into docs/api.md."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--check", action="store_true", help="write nothing; fail where the file is out of date")

    def handle(self, *args: Any, **options: Any) -> None:
        path = Path(settings.BASE_DIR) / "docs" / "api.md"
        text = path.read_text()
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise CommandError(f"{path} has lost its parameter markers")
        made = before + BEGIN + "\n" + markdown() + "\n" + END + after
        if options["check"]:
            if made != text:
                raise CommandError("docs/api.md is out of date; run: manage.py apidocs")
        elif made != text:
            path.write_text(made)
            self.stdout.write(f"wrote {path.name}")
