"""Django's own metrics, with labels that no client can make up."""

from __future__ import annotations

from typing import Any

from django_prometheus.middleware import PrometheusAfterMiddleware


class PagesMiddleware(PrometheusAfterMiddleware):
    """The middleware of django-prometheus, which labels its latencies with any method that is sent."""

    def label_metric(self, metric: Any, request: Any, response: Any = None, **labels: Any) -> Any:
        if "method" in labels:
            labels["method"] = self._method(request)
        return super().label_metric(metric, request, response, **labels)
