"""Accounts in Django's admin: keys are made and revoked, never edited or deleted; the admin's own log is read."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from apps.accounts import services
from apps.accounts.forms import AdminKeyForm
from apps.accounts.models import LIMIT_FIELDS, ApiKey, UsageRecord, UserLimits
from apps.accounts.usage import names_of, write_csv
from sluice.readonly import ReadOnlyAdmin


@admin.register(ApiKey)
class ApiKeyAdmin(admin.ModelAdmin):
    list_display = [
        "name",
        "prefix",
        "user",
        "scope_names",
        "status",
        "last_used",
        "expires_at",
        "created_at",
    ]
    list_filter = ["revoked_at", "expires_at"]
    list_select_related = ["user"]
    search_fields = ["name", "prefix", "user__username"]
    autocomplete_fields = ["user"]
    actions = ["revoke_selected"]
    ordering = ["-created_at"]

    @admin.display(description="Scopes")
    def scope_names(self, key: ApiKey) -> str:
        return ", ".join(key.scopes)

    def get_form(self, request: HttpRequest, obj: ApiKey | None = None, change: bool = False, **kwargs: Any) -> Any:
        if obj is None:
            kwargs["form"] = AdminKeyForm
        return super().get_form(request, obj, change=change, **kwargs)

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> list[str]:
        if obj is None:
            return ["name", "user", "scopes", "allowed_models", "expires_at", *LIMIT_FIELDS]
        return self.get_readonly_fields(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> list[str]:
        if obj is None:
            return []
        return [
            "name", "prefix", "user", "scopes", "allowed_models", "status",
            "created_at", "last_used", "expires_at", "revoked_at", *LIMIT_FIELDS,
        ]  # fmt: skip

    def has_delete_permission(self, request: HttpRequest, obj: ApiKey | None = None) -> bool:
        return False  # a revoked key stays, so that its prefix can still be explained

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        if change:
            return  # every field is read-only
        made = services.create_key(
            request.user,
            name=obj.name,
            user=obj.user,
            scopes=obj.scopes,
            expires_at=obj.expires_at,
            allowed_models=obj.allowed_models,
            limits={name: getattr(obj, name) for name in LIMIT_FIELDS},
        )
        obj.pk, obj.prefix = made.key.pk, made.key.prefix
        request.made_key = made  # type: ignore[attr-defined]

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return None  # the service has written it

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return None

    def response_add(self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None) -> HttpResponse:
        """Show the secret in this answer; a message would keep it in a cookie."""
        context = {
            **self.admin_site.each_context(request),
            "title": "API key created",
            "opts": self.opts,
            "created": request.made_key,  # type: ignore[attr-defined]
        }
        # Admin views are never cached, so the secret stays in this one answer.
        return TemplateResponse(request, "accounts/admin_key_created.html", context)

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        key = self.get_object(request, unquote(object_id))
        context = {
            "show_save": False,
            "show_save_and_continue": False,
            "key_active": key and key.status == "active",
        }
        return super().change_view(request, object_id, form_url, {**context, **(extra_context or {})})

    @admin.action(description="Revoke selected API keys", permissions=["change"])
    def revoke_selected(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> HttpResponse | None:
        if request.POST.get("confirmed") != "yes":
            context = {
                **self.admin_site.each_context(request),
                "title": "Revoke API keys?",
                "opts": self.opts,
                "keys": queryset.select_related("user"),
            }
            return TemplateResponse(request, "accounts/admin_revoke_selected.html", context)
        done = sum(services.revoke_key(request.user, key) for key in queryset)
        self.message_user(request, f"{done} API key(s) revoked.", messages.SUCCESS)
        return None


@admin.register(UserLimits)
class UserLimitsAdmin(admin.ModelAdmin):
    """Limits of a user over all keys; felt by every server within a second."""

    list_display = ["user", *LIMIT_FIELDS]
    autocomplete_fields = ["user"]
    search_fields = ["user__username"]


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyAdmin):
    """What has been used, to look at and to export; servers write it every few seconds."""

    list_display = ["day", "owner", "name", "model", "requests", "prompt_tokens", "generated_tokens"]
    list_filter = ["day", "model"]
    date_hierarchy = "day"
    search_fields = ["owner"]
    list_display_links = None
    actions = ["export_csv"]

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        changelist = super().get_changelist_instance(request)
        names = names_of({record.owner for record in changelist.result_list})
        for record in changelist.result_list:
            record.owner_name = names.get(record.owner, "")
        return changelist

    @admin.display(description="Name")
    def name(self, record: UsageRecord) -> str:
        return str(getattr(record, "owner_name", ""))

    @admin.action(description="Export selected records as CSV", permissions=["view"])
    def export_csv(self, request: HttpRequest, queryset: QuerySet[UsageRecord]) -> HttpResponse:
        reply = HttpResponse(content_type="text/csv; charset=utf-8")
        reply["Content-Disposition"] = 'attachment; filename="usage.csv"'
        write_csv(queryset.order_by("day", "owner", "model"), reply)
        return reply


@admin.register(LogEntry)
class LogEntryAdmin(ReadOnlyAdmin):
    """Who has done what in the admin."""

    list_display = ["action_time", "user", "content_type", "object_id", "what"]
    list_display_links = None
    list_filter = ["content_type", "user"]
    list_select_related = ["user", "content_type"]
    search_fields = ["object_id", "object_repr", "change_message", "user__username"]
    ordering = ["-action_time"]

    @admin.display(description="What")
    def what(self, entry: LogEntry) -> str:
        return entry.get_change_message() or entry.get_action_flag_display()
