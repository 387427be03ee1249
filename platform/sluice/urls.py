"""Django's pages. The API, health and WebSockets are in ``sluice.routes``."""

from django.contrib import admin
from django.templatetags.static import static
from django.urls import include, path
from django.views.generic import RedirectView

admin.site.site_header = admin.site.site_title = "Sluice"

urlpatterns = [
    path("admin/", admin.site.urls),
    path("accounts/", include("apps.accounts.urls")),
    # Browsers ask for it on pages that name no icon, such as the admin's.
    path("favicon.ico", RedirectView.as_view(url=static("sluice/img/favicon.svg"))),
    path("", include("apps.chat.urls")),
]
