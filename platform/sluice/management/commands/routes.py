"""Print every path of the server with its methods and its access rule."""

from __future__ import annotations

from typing import Any

from sluice.command import Command as SluiceCommand
from sluice.routetable import markdown


class Command(SluiceCommand):
    help = "Print every path that the server answers, with methods and access rule, as a Markdown table."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(markdown())
