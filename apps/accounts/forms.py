"""Forms for keys. They check shapes; the services decide."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.utils import timezone

from apps.accounts.models import LIMIT_FIELDS, ApiKey, Scope, default_scopes

LIFETIMES = [("30", "30 days"), ("90", "90 days"), ("365", "a year"), ("", "until revoked")]


class KeyForm(forms.Form):
    """A user's own new key; the admin scope is offered to superusers only."""

    name = forms.CharField(max_length=80, help_text="What the key is for, so that you know it later.")
    scopes = forms.MultipleChoiceField(
        choices=Scope.choices, widget=forms.CheckboxSelectMultiple, initial=default_scopes
    )
    lifetime = forms.ChoiceField(choices=LIFETIMES, required=False, initial="90", label="Valid for")
    allowed_models = forms.CharField(
        max_length=500,
        required=False,
        label="Allowed models",
        help_text="Names separated by commas; empty allows all.",
    )

    def __init__(self, *args: Any, actor: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not actor.is_superuser:
            scopes = self.fields["scopes"]
            assert isinstance(scopes, forms.MultipleChoiceField)
            scopes.choices = [c for c in Scope.choices if c[0] != Scope.ADMIN]

    def clean_allowed_models(self) -> list[str]:
        return split_names(self.cleaned_data["allowed_models"])

    def expires_at(self) -> datetime | None:
        days = self.cleaned_data["lifetime"]
        return timezone.now() + timedelta(days=int(days)) if days else None


class AdminKeyForm(forms.ModelForm):
    """A new key in Django's admin, for any user or for none."""

    scopes = forms.MultipleChoiceField(
        choices=Scope.choices, widget=forms.CheckboxSelectMultiple, initial=default_scopes
    )
    allowed_models = forms.CharField(
        max_length=500, required=False, help_text="Names separated by commas; empty allows all."
    )

    class Meta:
        model = ApiKey
        fields = ["name", "user", "scopes", "allowed_models", "expires_at", *LIMIT_FIELDS]

    def clean_allowed_models(self) -> list[str]:
        return split_names(self.cleaned_data["allowed_models"])

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        user = data.get("user")
        if user is not None and not user.is_superuser and Scope.ADMIN in data.get("scopes", []):
            self.add_error("scopes", "A key with the admin scope can belong to a superuser only.")
        expires = data.get("expires_at")
        if expires is not None and expires <= timezone.now():
            self.add_error("expires_at", "The expiry must lie in the future.")
        return data


def split_names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
