"""Under ``/accounts/``. Names have no namespace, as Django's own auth pages expect."""

from django.urls import path

from apps.accounts import views

urlpatterns = [
    path("login/", views.LoginView.as_view(), name="login"),
    path("logout/", views.LogoutView.as_view(), name="logout"),
    path("password/", views.PasswordChangeView.as_view(), name="password_change"),
    path("password/done/", views.PasswordChangeDoneView.as_view(), name="password_change_done"),
    path("usage/", views.usage, name="usage"),
    path("keys/", views.api_keys, name="api_keys"),
    path("keys/<slug:prefix>/", views.confirm_revoke, name="api_key_confirm_revoke"),
    path("keys/<slug:prefix>/revoke/", views.revoke, name="api_key_revoke"),
]
