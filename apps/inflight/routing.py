"""The one route of this app that is not a Django view."""

from sluice.routes import Route

http_routes = [Route("admin/inflight/live", "apps.inflight.consumers.InflightEvents", access="staff")]
