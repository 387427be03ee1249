"""The ASGI application: what ``manage.py serve``, ``daphne``, ``runserver`` and others serve."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sluice.settings")

from django.core.asgi import get_asgi_application

django_app = get_asgi_application()

from sluice.application import build_application  # noqa: E402 - needs the apps to be loaded

application = build_application(django_app)
