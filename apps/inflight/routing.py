"""The one route of this app that is not a Django view.

Not below ``/admin/``: a first path segment belongs either to the route table or to Django.
"""

from sluice.routes import Route

http_routes = [Route("inflight/live", "apps.inflight.consumers.InflightEvents", access="staff")]
