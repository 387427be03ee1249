"""Django's pages. The API, health and WebSockets are in ``sluice.routes``."""

from importlib.util import find_spec

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("accounts/", include("apps.accounts.urls")),
]
if find_spec("apps.chat.urls"):
    urlpatterns.append(path("", include("apps.chat.urls")))
