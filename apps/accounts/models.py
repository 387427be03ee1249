"""API keys, WebSocket tickets, limits and usage. Secrets are stored as SHA-256 hashes only.

A plain hash is right here and a slow one (PBKDF2, Argon2) would be wrong: the
secrets are 256 random bits, which nobody can guess however fast the hash, and
every API call has to check one.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.utils import timezone


class Scope(models.TextChoices):
    """What a key may do."""

    GENERATE = "generate", "Generate"
    READ = "read", "Read and cancel its own requests"
    ADMIN = "admin", "Administer: all requests, workers and servers"


def default_scopes() -> list[str]:
    return [Scope.GENERATE.value, Scope.READ.value]


def validate_scopes(value: object) -> None:
    """Raises ValidationError unless ``value`` is a non-empty list of known scopes without repeats."""
    if not isinstance(value, list) or not value:
        raise ValidationError("Give at least one scope.")
    for scope in value:
        if scope not in Scope.values:
            raise ValidationError(f"{scope!r} is no scope; choose from {', '.join(Scope.values)}.")
    if len(set(value)) != len(value):
        raise ValidationError("A scope is given twice.")


def validate_models(value: object) -> None:
    """Raises ValidationError unless ``value`` is a list of model aliases (empty: all models)."""
    if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() for v in value):
        raise ValidationError("Allowed models must be a list of model names; empty allows all.")


class Limited(models.Model):
    """Limits of one key or user; empty means the default (``SLUICE_LIMIT_...``), 0 no limit."""

    requests_per_minute = models.PositiveIntegerField(null=True, blank=True)
    tokens_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    concurrent_requests = models.PositiveIntegerField(null=True, blank=True)
    max_tokens_per_request = models.PositiveIntegerField(null=True, blank=True)
    tokens_per_day = models.PositiveBigIntegerField(null=True, blank=True)

    class Meta:
        abstract = True

    def own_limits(self) -> dict[str, int | None]:
        """By the names of :class:`apps.accounts.quota.Quota`."""
        return {
            "requests": self.requests_per_minute,
            "tokens": self.tokens_per_minute,
            "concurrent": self.concurrent_requests,
            "max_tokens": self.max_tokens_per_request,
            "day_tokens": self.tokens_per_day,
        }


LIMIT_FIELDS = [
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "max_tokens_per_request",
    "tokens_per_day",
]


class UserLimits(Limited):
    """Limits of a user, over all the user's keys and sessions together."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="limits")

    class Meta:
        verbose_name = verbose_name_plural = "user limits"

    def __str__(self) -> str:
        return f"limits of {self.user}"


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    def active(self) -> ApiKeyQuerySet:
        """Keys that would be accepted now: not revoked, not expired, of no disabled user."""
        now = timezone.now()
        return self.filter(
            Q(expires_at__isnull=True) | Q(expires_at__gt=now),
            Q(user__isnull=True) | Q(user__is_active=True),
            revoked_at__isnull=True,
        )

    def for_user(self, user: models.Model) -> ApiKeyQuerySet:
        return self.filter(user=user)

    def touch(self, pk: int, *, every: timedelta) -> int:
        """Note that a key was used, at most once per ``every``; returns rows written (0 or 1)."""
        now = timezone.now()
        stale = Q(last_used__isnull=True) | Q(last_used__lt=now - every)
        return self.filter(stale, pk=pk).update(last_used=now)


class ApiKey(Limited):
    """One API key. ``prefix`` is public and names it; the secret itself is never stored."""

    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="api_keys",
        help_text="Empty for a service key that belongs to nobody.",
    )
    name = models.CharField(max_length=80, help_text="What the key is for.")
    prefix = models.CharField(max_length=16, unique=True, editable=False)
    digest = models.CharField(max_length=64, editable=False)
    scopes = models.JSONField(default=default_scopes, validators=[validate_scopes])
    allowed_models = models.JSONField(default=list, blank=True, validators=[validate_models])
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    last_used = models.DateTimeField(null=True, blank=True, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        verbose_name = "API key"
        ordering = ["-created_at"]
        indexes = [models.Index(fields=["user", "revoked_at"])]

    def __str__(self) -> str:
        return f"{self.name} (sk-sluice-{self.prefix}…)"

    @property
    def status(self) -> str:
        """``active``, ``revoked`` or ``expired``."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= timezone.now():
            return "expired"
        return "active"


class Ticket(models.Model):
    """A WebSocket ticket: redeeming it deletes the row, so that it works once, on one server."""

    digest = models.CharField(max_length=64, unique=True)
    principal = models.JSONField()
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        verbose_name = "WebSocket ticket"
        default_permissions = ()

    def __str__(self) -> str:
        return f"ticket until {self.expires_at:%H:%M:%S}"


class UsageRecord(models.Model):
    """What one owner has used of one model on one day (UTC).

    Attributes:
        owner: ``key:<prefix>`` or ``user:<id>``, as in the request's record.
    """

    day = models.DateField()
    owner = models.CharField(max_length=80)
    model = models.CharField(max_length=200)
    requests = models.PositiveBigIntegerField(default=0)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    generated_tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        verbose_name = "usage record"
        ordering = ["-day", "owner", "model"]
        default_permissions = ("view",)
        constraints = [models.UniqueConstraint(fields=["day", "owner", "model"], name="usage_once_a_day")]

    def __str__(self) -> str:
        return f"{self.owner} on {self.day}: {self.requests} requests of {self.model}"


class UsageBatch(models.Model):
    """A batch of usage that has been added up; its row is what makes adding it twice impossible."""

    id = models.CharField(primary_key=True, max_length=32)
    added_at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.id
