"""The base of our management commands: what goes wrong is one line that begins with ``error:``."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, SystemCheckError

from inference.errors import SluiceError


class Command(BaseCommand):
    """As Django's, which would begin that line with the name of a class.

    Raise :class:`CommandError` (or any :class:`~inference.errors.SluiceError`) with a
    sentence. It still arrives as an exception where the command is called from code,
    and with ``--traceback``.
    """

    def execute(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute(*args, **options)
        except (CommandError, SluiceError) as exc:
            if isinstance(exc, SystemCheckError) or not self._called_from_command_line or options.get("traceback"):
                raise
            self.stderr.write(f"error: {exc}")
            sys.exit(exc.returncode if isinstance(exc, CommandError) else 1)
