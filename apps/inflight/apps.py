from django.apps import AppConfig


class InflightConfig(AppConfig):
    name = "apps.inflight"
    label = "inflight"
    verbose_name = "In flight"
    default_auto_field = "django.db.models.BigAutoField"
