"""Django's pages. The API, health and WebSockets are in ``sluice.routes``."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("accounts/", include("apps.accounts.urls")),
    path("", include("apps.chat.urls")),
]
