"""The base of our management commands: what goes wrong is one line that begins with ``error:``."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, SystemCheckError
from django.db import OperationalError, ProgrammingError

from inference.errors import SluiceError, StoreUnavailable
from sluice import variables

NO_REDIS = "REDIS_URL is not set; give it the one that the servers use ('make serve' prints its own)"


class Command(BaseCommand):
    """As Django's, which would begin that line with the name of a class.

    Raise :class:`CommandError` (or any :class:`~inference.errors.SluiceError`) with a
    sentence. It still arrives as an exception where the command is called from code,
    and with ``--traceback``.
    """

    def execute(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute(*args, **options)
        except (CommandError, SluiceError, OperationalError, ProgrammingError) as exc:
            if isinstance(exc, SystemCheckError) or not self._called_from_command_line or options.get("traceback"):
                raise
            self.stderr.write(f"error: {_words(exc)}")
            sys.exit(exc.returncode if isinstance(exc, CommandError) else 1)

    def warn(self, *sentences: str) -> None:
        for sentence in sentences:
            self.stderr.write(self.style.WARNING(f"Warning: {sentence}"))

    def warn_of_unknown_settings(self) -> None:
        """For the commands that start something; what they start does not repeat it."""
        self.warn(*variables.unknown(os.environ))


def _words(exc: Exception) -> str:
    """What went wrong and, where a setting or a forgotten step is to blame, the mend."""
    if isinstance(exc, StoreUnavailable):
        return f"{str(exc).rstrip('.')}; start it, or correct REDIS_URL"
    if isinstance(exc, (OperationalError, ProgrammingError)):
        first = (str(exc).splitlines() or [""])[0]
        return f"the database cannot answer ({first}); check DATABASE_URL and run 'manage.py migrate'"
    return str(exc)
