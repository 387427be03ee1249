"""Sign-in pages (Django's own views) and the pages of one's API keys and usage."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth import views as auth_views
from django.contrib.auth.decorators import login_required
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from apps.accounts import services
from apps.accounts.forms import KeyForm
from apps.accounts.models import ApiKey
from apps.accounts.usage import of_user

USAGE_DAYS = (7, 30, 90)
"""Spans that the page of one's usage offers, days."""


class LoginView(auth_views.LoginView):
    template_name = "accounts/login.html"
    redirect_authenticated_user = True


class PasswordChangeView(auth_views.PasswordChangeView):
    template_name = "accounts/password_change.html"


class PasswordChangeDoneView(auth_views.PasswordChangeDoneView):
    template_name = "accounts/password_change_done.html"


class LogoutView(auth_views.LogoutView):
    next_page = "login"


@never_cache
@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def api_keys(request: HttpRequest) -> HttpResponse:
    """One's own keys, and a form for another one."""
    form = KeyForm(request.POST or None, actor=request.user)
    created: services.CreatedKey | None = None
    if request.method == "POST" and form.is_valid():
        try:
            created = services.create_key(
                request.user,
                name=form.cleaned_data["name"],
                user=request.user,
                scopes=form.cleaned_data["scopes"],
                expires_at=form.expires_at(),
                allowed_models=form.cleaned_data["allowed_models"],
            )
        except ValidationError as e:
            form.add_error(None, e.messages)
        else:
            form = KeyForm(actor=request.user)
    # The secret goes out in this one answer, and not through a redirect: that would have to keep it.
    context = {
        "form": form,
        "created": created,
        "keys": ApiKey.objects.for_user(request.user),  # type: ignore[arg-type]
    }
    return render(request, "accounts/api_keys.html", context, status=201 if created else 200)


@never_cache
@login_required
@require_safe
def usage(request: HttpRequest) -> HttpResponse:
    """What one has used, by day and model; ``?days=`` is one of :data:`USAGE_DAYS`."""
    wanted = request.GET.get("days", "")
    days = next((d for d in USAGE_DAYS if str(d) == wanted), USAGE_DAYS[1])
    rows = of_user(request.user, days)
    total = {name: sum(row[name] for row in rows) for name in ("requests", "prompt_tokens", "generated_tokens")}
    return render(request, "accounts/usage.html", {"rows": rows, "total": total, "days": days, "choices": USAGE_DAYS})


@never_cache
@login_required
@require_safe
def confirm_revoke(request: HttpRequest, prefix: str) -> HttpResponse:
    """Asks before a key is ended."""
    key = get_object_or_404(ApiKey.objects.for_user(request.user), prefix=prefix)  # type: ignore[arg-type]
    return render(request, "accounts/api_key_revoke.html", {"key": key})


@login_required
@require_http_methods(["POST"])
def revoke(request: HttpRequest, prefix: str) -> HttpResponse:
    """Ends one of one's own keys; another's is not found."""
    key = get_object_or_404(ApiKey.objects.for_user(request.user), prefix=prefix)  # type: ignore[arg-type]
    services.revoke_key(request.user, key)
    messages.success(request, f"The key “{key.name}” is revoked.")
    return redirect("api_keys")
