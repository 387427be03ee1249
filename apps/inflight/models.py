"""No tables: what is in flight lives in Redis. These classes give Django's admin a name and permissions."""

from __future__ import annotations

from django.db import models


class InflightRequest(models.Model):
    """One generation in flight, for the admin's index, its log and its permissions."""

    id = models.CharField(primary_key=True, max_length=200)

    class Meta:
        managed = False
        default_permissions = ()
        permissions = [
            ("view_inflight", "Can see requests in flight, workers and servers"),
            ("cancel_request", "Can cancel anybody's request"),
            ("drain_server", "Can quiet, resume, drain and restart workers and servers"),
            ("view_text", "Can read prompts and answers of requests in flight"),
        ]
        verbose_name = "request in flight"
        verbose_name_plural = "requests in flight"

    def __str__(self) -> str:
        return self.id
