"""Request state in Redis: typed operations, each multi-key change one Lua script."""

from inference.store.audit import AuditReport, audit
from inference.store.records import Page, RequestView, Submission
from inference.store.store import RequestStore
from inference.store.views import StoreViews

__all__ = ["AuditReport", "Page", "RequestStore", "RequestView", "StoreViews", "Submission", "audit"]
