"""The project's own app: it carries the management commands (and wins over those of Channels)."""

from django.apps import AppConfig


class SluiceConfig(AppConfig):
    name = "sluice"
    verbose_name = "Sluice"
