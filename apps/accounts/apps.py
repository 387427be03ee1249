from django.apps import AppConfig

from apps.accounts import quota


class AccountsConfig(AppConfig):
    name = "apps.accounts"
    label = "accounts"
    verbose_name = "Accounts"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        quota.defaults()  # a malformed limit stops the start, not a request
